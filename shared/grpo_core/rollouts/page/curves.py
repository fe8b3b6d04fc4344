"""Curves over the steps: their titles, and those that the rollouts themselves give."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from grpo_core.rollouts.page.encode import Json, rounded
from grpo_core.rollouts.record import RolloutRecord

Point = tuple[float, float]
"""Step and value."""
Interval = tuple[float, float, float]
"""Step, lower and upper end of a confidence interval."""

REWARD = "reward/mean"
PART = "reward/part/"
LENGTH = "rollout/completion_tokens_mean"
ALIGNMENT = "alignment/diff_abs_mean"
STALENESS = "staleness/mean"
EVALUATION = "eval/"

TITLES: Mapping[str, tuple[str, str]] = {
    REWARD: ("Mean reward", ""),
    LENGTH: ("Completion length", "tokens"),
    ALIGNMENT: ("Logprob difference", "nats"),
    "grpo/clipped_fraction": ("Clipped fraction", ""),
    STALENESS: ("Staleness", "steps"),
    "policy/entropy": ("Entropy", "nats"),
}
"""Title and unit of a metric, in the order of the page."""


class MeansOfSteps:
    """Means over the sequences of each step."""

    def __init__(self) -> None:
        self.curves: dict[str, list[Point]] = {}

    def add(self, step: int, records: Sequence[RolloutRecord]) -> None:
        for name, values in _values(records):
            known = [value for value in values if value is not None and math.isfinite(value)]
            if known:
                self.curves.setdefault(name, []).append((step, fmean(known)))


def _values(records: Sequence[RolloutRecord]) -> Iterator[tuple[str, list[float | None]]]:
    yield REWARD, [record.score for record in records]
    for part in dict.fromkeys(name for record in records for name in record.parts):
        yield PART + part, [record.parts.get(part) for record in records]
    yield LENGTH, [record.completion_tokens for record in records]
    yield ALIGNMENT, [record.mean_logprob_difference for record in records]
    yield STALENESS, [record.staleness for record in records]


def encoded(
    curves: Mapping[str, Sequence[Point]], intervals: Mapping[str, Sequence[Interval]]
) -> list[Json]:
    """The curves with titles: the reward first, then evaluations, parts of the reward, others."""
    return [
        {
            "name": name,
            "title": title_of(name)[0],
            "unit": title_of(name)[1],
            "points": [[rounded(x), rounded(y)] for x, y in curves[name]],
            "interval": [[rounded(value) for value in one] for one in intervals.get(name, ())],
        }
        for name in sorted(curves, key=_place)
        if curves[name]
    ]


def title_of(name: str) -> tuple[str, str]:
    """Title and unit."""
    if name.startswith(PART):
        return f"Reward part: {name.removeprefix(PART)}", ""
    if name.startswith(EVALUATION):
        task, _, metric = name.removeprefix(EVALUATION).rpartition("/")
        return f"Evaluation: {metric}" + (f" on {task}" if task else ""), ""
    return TITLES.get(name, (name, ""))


def _place(name: str) -> tuple[int, int]:
    known = [*TITLES]
    if name == REWARD:
        return 0, 0
    if name.startswith(EVALUATION):
        return 1, 0
    if name.startswith(PART):
        return 2, 0
    return 3, known.index(name) if name in known else len(known)
