"""The help of the recipe scripts: every key, and what becomes of it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from grpo_offline.recipe.table import KEYS

_WIDTH, _INDENT = 98, " " * 6
_HEADINGS = {
    "used": "Keys",
    "without effect": "Keys without effect; a given one is named at the start",
    "refused": "Keys that are refused, unless they ask for nothing",
}


def help_text(prog: str) -> str:
    return "\n".join(_lines(prog)) + "\n"


def _lines(prog: str) -> Iterator[str]:
    yield f"usage: {prog} --config RECIPE.yaml [--KEY VALUE]..."
    yield ""
    yield "Trains a model as a recipe says. Flags win over the recipe."
    for use, heading in _HEADINGS.items():
        yield f"\n{heading}:"
        for key in KEYS:
            if key.use == use:
                yield f"  --{key.name} (default: {key.shown_default})"
                plain = key.text.replace("`", "")
                yield from textwrap.wrap(
                    plain, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT
                )
