"""What is measured, what it should be, and several measurements of it in three numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class OneIn:
    """At most a `parts`-th of what it is with atroposlib."""

    parts: int

    def __str__(self) -> str:
        return f"ratio at most 1/{self.parts}"

    def is_met(self, ours: float, theirs: float) -> bool:
        return ours * self.parts <= theirs


@dataclass(frozen=True)
class AtMost:
    """At most `limit`, whatever it is with atroposlib."""

    limit: float

    def __str__(self) -> str:
        return f"at most {self.limit:g}"

    def is_met(self, ours: float) -> bool:
        return ours <= self.limit


@dataclass(frozen=True)
class Metric:
    """`goal` is run-api's; None where the number stands beside others that have one."""

    name: str
    unit: str
    goal: OneIn | AtMost | None = None


@dataclass(frozen=True)
class Reading:
    metric: Metric
    value: float


@dataclass(frozen=True)
class Spread:
    """The median of several runs, the lowest and the highest of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Needs one value at least."""
        return cls(median(values), min(values), max(values))


def verdict(metric: Metric, ours: Spread | None, theirs: Spread | None) -> bool | None:
    """Whether the medians meet the goal; None where there is none, or not enough was measured."""
    match metric.goal:
        case OneIn() as goal if ours and theirs:
            return goal.is_met(ours.median, theirs.median)
        case AtMost() as goal if ours:
            return goal.is_met(ours.median)
        case _:
            return None
