"""Functions for fields that several commands have."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def each_once(values: tuple[T, ...]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(values))
