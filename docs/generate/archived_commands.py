"""Command lines of the archived trainer's documents, with what our commands make of them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from docs.generate.markdown import table
from tests.compat.reference_commands import (
    ENVIRONMENT,
    FRAGMENT,
    RUN_API,
    Command,
    commands,
    outcome,
)

_MODEL, _PORT = "model", 9001
_HIDDEN = frozenset({"MODEL", "CUDA_VISIBLE_DEVICES"})
"""Variables of the documents' shells that no program reads, or that only choose a GPU."""
_READ_NONE = frozenset({ENVIRONMENT, RUN_API})
"""Programs that read none of the documents' variables."""


def lines() -> str:
    return _table(command for command in commands() if command.program != FRAGMENT)


def options() -> str:
    return _table(command for command in commands() if command.program == FRAGMENT)


def _table(found: Iterable[Command]) -> str:
    rows: dict[tuple[str, str], list[str]] = {}
    for command in found:
        text = f"`{_text(command)}`"
        rows.setdefault((text, str(outcome(command, _MODEL, _PORT))), []).append(command.place)
    return table(
        [
            "Archived command line",
            "Document (`early`, `middle` or `latest`) and line",
            "Outcome in GRPO stack",
        ],
        [[text, ", ".join(places), result] for (text, result), places in rows.items()],
    )


def _text(command: Command) -> str:
    hidden = command.environment if command.command in _READ_NONE else _HIDDEN
    shown = [f"{name}={text}" for name, text in command.environment.items() if name not in hidden]
    return " ".join([*shown, shlex.join(command.typed)])
