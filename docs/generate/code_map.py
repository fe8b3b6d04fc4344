"""The tree of packages, rooms and modules, each with the first paragraph of its docstring."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from docs.generate.source import PACKAGES, package_directory, parsed, summary


def tree(package: str) -> str:
    directory = package_directory(package)
    lines = [(f"{PACKAGES[package]}/{package}/", _summary(directory / "__init__.py"))]
    lines += _entries(directory, "  ")
    width = max(len(name) for name, _ in lines) + 2
    return "\n".join(["```text", *(f"{name:{width}}{says}" for name, says in lines), "```"])


def _entries(directory: Path, indent: str) -> Iterator[tuple[str, str]]:
    for path in sorted(directory.iterdir()):
        if (path / "__init__.py").exists():
            yield f"{indent}{path.name}/", _summary(path / "__init__.py")
            yield from _entries(path, indent + "  ")
        elif path.suffix == ".py" and path.name != "__init__.py":
            yield indent + path.name, _summary(path)


def _summary(path: Path) -> str:
    return summary(parsed(path), str(path))
