"""The values of the Helm chart, from the comments of its values.yaml."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import yaml

from docs.generate.markdown import table
from docs.generate.source import ROOT, NoDocstring

_FILE = ROOT / "helm/grpo/values.yaml"
_FIRST = "# -- "
"""Begins the comment that documents the value below it."""
_PARAGRAPH = "\n\n"


class _Value(NamedTuple):
    path: str
    default: str
    meaning: str


def values() -> str:
    """A table of the values that stand alone, then a section for each group."""
    text = _FILE.read_text()
    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    groups: dict[str, list[_Value]] = {}
    for value in _documented(text, root, ""):
        group, _, rest = value.path.partition(".")
        groups.setdefault(group if rest else "", []).append(value)
    alone = groups.pop("")
    sections = [_table(alone)]
    for group, members in groups.items():
        sections += [f"## {group}", _table(members)]
    return _PARAGRAPH.join(sections)


def _table(members: list[_Value]) -> str:
    rows = [[f"`{one.path}`", one.default, one.meaning] for one in members]
    return table(["Value", "Default", "Meaning"], rows)


def _documented(text: str, node: yaml.MappingNode, prefix: str) -> Iterator[_Value]:
    for key, value in node.value:
        path = prefix + key.value
        meaning = _comment_above(text.splitlines(), key.start_mark.line)
        if meaning:
            default = text[value.start_mark.index : value.end_mark.index].strip()
            yield _Value(path, "empty" if default == '""' else f"`{default}`", meaning)
        elif isinstance(value, yaml.MappingNode):
            yield from _documented(text, value, f"{path}.")
        else:
            raise NoDocstring(f"{_FILE.name}: {path} has no comment that begins with '{_FIRST}'")


def _comment_above(lines: list[str], line: int) -> str:
    """The comment that ends above this line, or "" if it documents no value."""
    said: list[str] = []
    while line and (comment := lines[line - 1].strip()).startswith("#"):
        line -= 1
        if comment.startswith(_FIRST):
            return " ".join([comment.removeprefix(_FIRST), *reversed(said)])
        said.append(comment.removeprefix("#").strip())
    return ""
