"""Grades with a third state: right, wrong, or not gradable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_env.tasks import Item


@dataclass(frozen=True)
class Grades:
    """`scores` of the answers that could be graded, in order; `quarantined` says why others not.

    With nothing quarantined, scores[i] belongs to completion i.
    """

    scores: tuple[float, ...]
    quarantined: tuple[str, ...]


def grade_all(item: Item, completions: Sequence[str]) -> Grades:
    """Grade every completion; an answer that cannot be graded never becomes a 0."""
    scores: list[float] = []
    quarantined: list[str] = []
    for index, completion in enumerate(completions):
        try:
            score = item.grade(completion)
        except ValueError as error:
            quarantined.append(f"completion {index}: {error}")
            continue
        if math.isfinite(score):
            scores.append(score)
        else:
            quarantined.append(f"completion {index}: score {score}")
    return Grades(tuple(scores), tuple(quarantined))
