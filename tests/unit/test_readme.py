"""The README's tree names every source file, and none that is not there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def listed() -> set[str]:
    """Paths in the fenced block under "Where things are"."""
    block = README.split("## Where things are")[1].split("```")[1]
    found, folder = set(), ""
    for line in block.strip().splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = name
        else:
            found.add(folder + name)
    return found


def test_the_tree_is_complete() -> None:
    sources = [*ROOT.glob("shared/src/**/*"), *ROOT.glob("services/*/src/**/*")]
    present = {
        str(path.relative_to(ROOT))
        for path in sources
        if path.suffix in (".py", ".lua")
        and path.name != "__init__.py"
        and "egg-info" not in str(path)
    }
    assert listed() == present


def test_every_make_target_that_the_readme_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text() + (ROOT / "containers/containers.mk").read_text()
    named = set(re.findall(r"(?m)(?:^|`)make ([a-z-]+)", README))
    assert {"demo", "test", "help"} <= named
    for target in named:
        assert re.search(rf"(?m)^{target}[ :]|^[a-z ]*\b{target}\b[a-z ]*:", makefile), target
