"""Named errors: every class below GrpoError, with the first paragraph of its docstring."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from docs.generate.markdown import table as markdown_table
from docs.generate.source import PACKAGES, modules, parsed, summary

_BASE = "GrpoError"
_STATUS = "STATUS"
"""A dictionary of errors that a server answers with an HTTP status: nobody reads their names."""


def table(package: str) -> str:
    """Errors of one package that are no base of others."""
    classes = dict(_classes(package))
    ours = _descendants()
    bases = {base for node in classes.values() for base in _bases(node)}
    answered = _answered(package)
    return markdown_table(
        ["Error", "Meaning"],
        [
            [f"`{name}`", summary(node, f"{package}: {name}")]
            for name, node in sorted(classes.items())
            if name in ours and name not in bases | answered
        ],
    )


def _classes(package: str) -> Iterator[tuple[str, ast.ClassDef]]:
    for path in modules(package):
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef):
                yield node.name, node


def _bases(node: ast.ClassDef) -> list[str]:
    return [base.id for base in node.bases if isinstance(base, ast.Name)]


def _descendants() -> set[str]:
    classes = [item for package in PACKAGES for item in _classes(package)]
    found = {_BASE}
    while more := {name for name, node in classes if found & {*_bases(node)}} - found:
        found |= more
    return found - {_BASE}


def _answered(package: str) -> set[str]:
    return {
        key.id
        for path in modules(package)
        for node in parsed(path).body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.target.id == _STATUS
        and isinstance(node.value, ast.Dict)
        for key in node.value.keys
        if isinstance(key, ast.Name)
    }
