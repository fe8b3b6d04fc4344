"""Our packages as source code: docstrings and classes are read without importing anything."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "grpo_core": "shared",
    "grpo_env": "services/environment",
    "grpo_api": "services/run-api",
    "grpo_trainer": "services/trainer",
    "grpo_vllm": "services/vllm-server",
    "grpo_runs": "services/runs",
    "grpo_tiny_model": "services/tiny-model",
}
"""In the order of the data's way: prompt → rollout → scored group → batch → update → weights."""


class NoDocstring(Exception):
    """Something that the documentation lists has no docstring."""


def package_directory(package: str) -> Path:
    return ROOT / PACKAGES[package] / package


def modules(package: str) -> Iterator[Path]:
    return iter(sorted(package_directory(package).rglob("*.py")))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def summary(node: ast.Module | ast.ClassDef, where: str) -> str:
    """The first paragraph of a docstring, as one line."""
    docstring = ast.get_docstring(node)
    if not docstring:
        raise NoDocstring(f"{where}: write a docstring; the documentation shows it")
    return " ".join(docstring.split("\n\n")[0].split())
