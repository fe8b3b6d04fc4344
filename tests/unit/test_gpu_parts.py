"""`make test-gpu` runs where CI cannot look: the tests that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests/gpu/run.sh"


def named() -> list[tuple[str, str]]:
    """(file, test or "") of every test that the script names."""
    text = SCRIPT.read_text()
    variables = dict(re.findall(r"(?m)^(\w+)=(tests/\S+)$", text))
    for name, value in variables.items():
        text = text.replace(f"${name}", value)
    return re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", text)


def test_every_part_names_tests_that_exist() -> None:
    found = named()
    assert len(found) >= 8
    for file, test in found:
        assert test == "" or f"def {test}(" in (ROOT / file).read_text(), f"{file}::{test}"
        assert (ROOT / file).is_file()


@pytest.mark.parametrize("path", sorted((ROOT / "tests/gpu").glob("test_*.py")))
def test_every_gpu_test_belongs_to_a_part(path: Path) -> None:
    assert str(path.relative_to(ROOT)) in {file for file, _ in named()}
