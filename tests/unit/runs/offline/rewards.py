"""Rewards of the tests."""

from __future__ import annotations

from typing import Any


def length(answer: Any, row: dict[str, Any]) -> float:
    """Completions of a random model differ in this."""
    return (sum(map(ord, answer)) % 7) / 7 + row["bonus"]


def failing(answer: Any, row: dict[str, Any]) -> float:
    raise ValueError(f"no reward for {answer} to {row}")
