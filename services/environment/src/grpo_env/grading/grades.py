"""Grades with a third state: right, wrong, or not gradable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_env.tasks import Answer, Item


@dataclass(frozen=True)
class Grades:
    """`scores` of the answers that could be graded, in order; `quarantined` says why others not.

    With nothing quarantined, scores[i] belongs to answer i.
    """

    scores: tuple[float, ...]
    quarantined: tuple[str, ...]


def grade_all(item: Item, answers: Sequence[Answer]) -> Grades:
    """Grade every answer; one that cannot be graded never becomes a 0."""
    scores: list[float] = []
    quarantined: list[str] = []
    for index, answer in enumerate(answers):
        try:
            score = item.grade(answer)
        except ValueError as error:
            quarantined.append(f"completion {index}: {error}")
            continue
        if math.isfinite(score):
            scores.append(score)
        else:
            quarantined.append(f"completion {index}: score {score}")
    return Grades(tuple(scores), tuple(quarantined))
