"""Warns when a metric leaves the range in which training is known to go well."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

log = structlog.get_logger()

REPEAT_EVERY_STEPS = 50
"""A metric that stays outside, or comes and goes, is mentioned that often."""


@dataclass(frozen=True)
class HealthyRange:
    """Both bounds are healthy."""

    metric: str
    low: float
    high: float
    look_at: str

    def __str__(self) -> str:
        if self.low == -math.inf:
            return f"at most {self.high:g}"
        if self.high == math.inf:
            return f"at least {self.low:g}"
        return f"{self.low:g} to {self.high:g}"


RANGES = (
    HealthyRange(
        "grpo/mean_ratio",
        0.8,
        1.2,
        "the policy moved far from the one that sampled: lower --lr, or let less data wait "
        "(staleness/mean); far from 1 at staleness 0: the logprobs or the temperature",
    ),
    HealthyRange(
        "grpo/clipped_fraction",
        0.0,
        0.3,
        "most of the batch teaches nothing any more: lower --lr, or let less data wait",
    ),
    HealthyRange(
        "alignment/diff_abs_mean",
        0.0,
        0.1,
        "staleness/mean and alignment/fresh_diff_abs_mean: with fresh data the difference is "
        "noise, so what is left comes from old data, or from steps that are too large",
    ),
    HealthyRange(
        "train/loss",
        -10.0,
        math.inf,
        "ratios or advantages exploded: grpo/ratio_max, reward/std_in_group and the scores that "
        "the environment sends",
    ),
)


@dataclass
class _Watch:
    """`outside`: steps since the last warning that the value was outside."""

    warned_at: int | None = None
    outside: int = 0


class RangeWatch:
    """Says when a value leaves its range, and at most every 50 steps that it still does."""

    def __init__(self) -> None:
        self._watches = {healthy.metric: _Watch() for healthy in RANGES}

    def look(self, record: Mapping[str, float]) -> None:
        """Args: record: one step's metrics; what is not in it is not judged."""
        for healthy in RANGES:
            value = record.get(healthy.metric)
            if value is not None and not healthy.low <= value <= healthy.high:
                self._outside(healthy, value, int(record["step"]))

    def _outside(self, healthy: HealthyRange, value: float, step: int) -> None:
        watch = self._watches[healthy.metric]
        watch.outside += 1
        if watch.warned_at is not None and step - watch.warned_at < REPEAT_EVERY_STEPS:
            return
        log.warning(
            "a metric is outside its healthy range",
            metric=healthy.metric,
            value=value,
            healthy=str(healthy),
            step=step,
            steps_outside_since_last_warning=watch.outside,
            look_at=healthy.look_at,
        )
        watch.warned_at, watch.outside = step, 0
