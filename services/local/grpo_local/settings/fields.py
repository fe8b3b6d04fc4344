"""Functions and texts for fields that several commands have."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")

HUB_OR_SMOLLM2 = (
    "an id on the Hugging Face hub, or smollm2 (SmolLM2-135M-Instruct, made from two optional "
    "packages)"
)
"""Values of --model that are no directory, for the user."""


def each_once(values: tuple[T, ...]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(values))
