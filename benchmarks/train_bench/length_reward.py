"""A reward that costs nothing and differs within nearly every group, so that none is dropped."""

from __future__ import annotations

from typing import Any


def reward(answer: str, row: Any) -> float:  # noqa: ARG001
    return len(answer) % 8 / 8
