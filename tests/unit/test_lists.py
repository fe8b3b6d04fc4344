"""Lists kept by hand are complete: in the README, in docs/trainer.md, in tests/gpu/run.sh."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from grpo_core.errors import GrpoError
from grpo_trainer import errors
from grpo_trainer.config.cli import CommandLine

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def tree() -> set[str]:
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


def test_the_tree_names_every_room_and_no_other() -> None:
    packages = [
        *ROOT.glob("shared/src/grpo_*"),
        *ROOT.glob("services/*/src/grpo_*"),
        *ROOT.glob("tiny-model/src/grpo_*"),
    ]
    present = {
        str(path.relative_to(ROOT)) + ("/" if path.is_dir() else "")
        for package in packages
        if (package / "__init__.py").exists()
        for path in package.iterdir()
        if (path.suffix == ".py" and path.name != "__init__.py") or (path / "__init__.py").exists()
    }
    assert tree() == present


def test_every_make_target_that_the_readme_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text() + (ROOT / "containers/containers.mk").read_text()
    named = set(re.findall(r"(?m)(?:^|`)make ([a-z-]+)", README))
    assert {"demo", "test", "help"} <= named
    for target in named:
        assert re.search(rf"(?m)^{target}[ :]|^[a-z ]*\b{target}\b[a-z ]*:", makefile), target


def test_every_gpu_test_belongs_to_a_part_and_every_part_names_tests_that_exist() -> None:
    text = (ROOT / "tests/gpu/run.sh").read_text()
    for name, value in re.findall(r"(?m)^(\w+)=(tests/\S+)$", text):
        text = text.replace(f"${name}", value)
    named = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", text)
    for file, test in named:
        assert test == "" or f"def {test}(" in (ROOT / file).read_text(), f"{file}::{test}"
    present = {str(path.relative_to(ROOT)) for path in (ROOT / "tests/gpu").glob("test_*.py")}
    assert present <= {file for file, _ in named}


def section(title: str) -> str:
    page = (ROOT / "docs/trainer.md").read_text()
    return page.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_trainers_page_names_every_option() -> None:
    named = set(re.findall(r"`--([a-z-]+)`", section("Options")))
    fields = {name.replace("_", "-") for name in CommandLine.model_fields}
    assert named == fields


def test_the_trainers_page_names_every_error() -> None:
    named = set(re.findall(r"`([A-Z]\w+)`", section("Errors and exit status")))
    ours = {
        name
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, GrpoError) and not kind.__subclasses__()
    }
    of_services = {"ServiceUnavailable", "RequestRefused", "ProtocolViolation"}
    of_run_api = {"TrainerSuperseded", "LeasesFull", "UnknownBatch"}
    assert named == ours | of_services | of_run_api


def test_the_trainers_page_names_every_reason() -> None:
    named = re.findall(r"(?m)^\| `(\w+)` \|", section("Groups that cannot be trained on"))
    assert sorted(named) == sorted(errors.UnusableReason)
