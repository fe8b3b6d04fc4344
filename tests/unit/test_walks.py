"""Every file and name in the walk through the code exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/explanation/architecture.md").read_text()
ENTRIES = re.findall(r"(?m)^\d+\. `([^`]+\.py)` → `([^`]+)` →", PAGE)


def test_the_walk_opens_at_most_26_files() -> None:
    assert [len(ENTRIES), len({file for file, _ in ENTRIES[:25]})] == [30, 25]


@pytest.mark.parametrize(("file", "name"), ENTRIES)
def test_the_entry_exists(file: str, name: str) -> None:
    scope: list[ast.stmt] = ast.parse((ROOT / file).read_text()).body
    for part in name.split("."):
        found = [
            node
            for node in scope
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name == part
        ]
        assert found, f"{file} has no {name}"
        scope = found[0].body
