"""Compares two evaluations of the same items, such as before and after training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from grpo_core.errors import GrpoError
from grpo_core.evaluation.results import MEAN, PASS, EvalItem, EvalResult
from grpo_core.evaluation.statistics import Interval, difference_interval


class NotComparable(GrpoError):
    """Two evaluations have no item in common, or differ in how answers were sampled."""


@dataclass(frozen=True)
class Lift:
    """The change of one metric. `interval`: of the change; None if it cannot be told."""

    metric: str
    before: float
    after: float
    interval: Interval | None

    @property
    def change(self) -> float:
        return self.after - self.before

    @property
    def is_clear(self) -> bool:
        """The interval excludes 0."""
        return self.interval is not None and not self.interval.low <= 0.0 <= self.interval.high


@dataclass(frozen=True)
class Comparison:
    """Lifts on the items that both evaluations have. `unpaired`: items that only one has."""

    task: str
    lifts: tuple[Lift, ...]
    items: int
    unpaired: int


def compare(before: EvalResult, after: EvalResult, seed: int = 0) -> Comparison:
    """The lift of each `pass@k` and `mean@k` that both have, with its paired interval.

    Raises:
        NotComparable: the tasks, temperatures or numbers of answers differ, or no item is in both.
    """
    if differing := list(_differences(before, after)):
        raise NotComparable(
            f"evaluations of {after.task} cannot be compared: {'; '.join(differing)}; evaluate "
            "both with the same options"
        )
    first = {item.item: item for item in before.items}
    pairs = [(first[item.item], item) for item in after.items if item.item in first]
    if not pairs:
        raise NotComparable(
            f"evaluations of {after.task} cannot be compared: they have no item in common; "
            "evaluate both on the same data with the same --seed"
        )
    names = [name for name in after.metrics if "@" in name and name in before.metrics]
    return Comparison(
        task=after.task,
        lifts=tuple(_lift(name, pairs, seed) for name in names),
        items=len(pairs),
        unpaired=len(before.items) + len(after.items) - 2 * len(pairs),
    )


def _differences(before: EvalResult, after: EvalResult) -> Iterator[str]:
    for name in ("task", "temperature", "samples"):
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            yield f"{name} {old} and {new}"


def _lift(metric: str, pairs: list[tuple[EvalItem, EvalItem]], seed: int) -> Lift:
    old = [_value(item, metric) for item, _ in pairs]
    new = [_value(item, metric) for _, item in pairs]
    return Lift(metric, fmean(old), fmean(new), difference_interval(old, new, seed))


def _value(item: EvalItem, metric: str) -> float:
    name, _, k = metric.partition("@")
    return {PASS: item.pass_at, MEAN: item.mean_at}[name](int(k))
