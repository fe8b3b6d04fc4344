"""Options of a command."""

from __future__ import annotations


def tables(command: str) -> str:
    return command
