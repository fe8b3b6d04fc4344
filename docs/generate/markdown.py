"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(text) for text in line)} |" for line in lines)


def _cell(text: str) -> str:
    """On one line, with angle brackets that are no HTML."""
    quoted = " ".join(text.split()).replace("|", "\\|").split("`")
    quoted[::2] = [part.replace("<", "&lt;") for part in quoted[::2]]
    return "`".join(quoted)
