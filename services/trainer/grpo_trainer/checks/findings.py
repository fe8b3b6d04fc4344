"""Warns without ending the run: findings of checks, and metrics outside their healthy range."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import structlog

log = structlog.get_logger()

REPEAT_EVERY_STEPS = 50
"""Minimum number of steps between two warnings of one check about one environment, or about one
metric."""


class CheckName(StrEnum):
    """The checks that warn, by their name in the event `check.failed`."""

    END_TOKEN_MASKED = "end_token_masked"
    VERSION_AHEAD = "version_ahead"
    INCONSISTENT_SCORES = "inconsistent_scores"
    UNFINISHED_SCORED = "unfinished_scored"
    EQUAL_SCORES = "equal_scores"
    IMPORTANCE_RATIO = "importance_ratio"
    TEMPERATURE = "temperature"
    SINGLE_TOKENS = "single_tokens"
    TRUNCATED_SAMPLING = "truncated_sampling"
    REFERENCE_MOVED = "reference_moved"
    LOST_UPDATE = "lost_update"


@dataclass(frozen=True)
class Finding:
    """What a check found, and what to do. `env_id`: None if it concerns no environment, or one
    without an id."""

    check: CheckName
    env_id: int | None
    reason: str
    hint: str


class FindingLog:
    """Warns of findings: of each check and environment at most every 50 steps.

    `abstained`: by check, number of batches that it could not judge."""

    def __init__(self) -> None:
        self.abstained: Counter[CheckName] = Counter()
        self._warned_at: dict[tuple[CheckName, int | None], int] = {}

    def report(self, findings: Iterable[Finding], step: int) -> int:
        """Log the findings of one step; returns their number."""
        count = 0
        for finding in findings:
            count += 1
            key = finding.check, finding.env_id
            if step - self._warned_at.get(key, -REPEAT_EVERY_STEPS) < REPEAT_EVERY_STEPS:
                continue
            self._warned_at[key] = step
            log.warning(
                "check.failed",
                check=str(finding.check),
                step=step,
                env_id=finding.env_id,
                reason=finding.reason,
                hint=finding.hint,
            )
        return count

    def report_abstentions(self, batches: int) -> None:
        """At the end of a run of so many batches."""
        for check, abstained in (+self.abstained).items():
            log.info(
                "check.abstained",
                check=str(check),
                abstained=abstained,
                batches=batches,
                reason="the policy had moved so far since it sampled these batches that its "
                "movement may explain the differences, or the movement could not be measured",
            )


STEPS_IN_A_ROW = 3


@dataclass(frozen=True)
class HealthyRange:
    """A metric's healthy range, both bounds included. `look_at` names what to check outside it."""

    metric: str
    low: float
    high: float
    look_at: str

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"at least {self.low:g}"
        return f"{self.low:g} to {self.high:g}"


RANGES = (
    HealthyRange(
        "grpo/effective_sample_fraction",
        0.2,
        1.0,
        "few tokens decide the gradient, because the policy is far from the weights that sampled "
        "them: lower --lr, or lower --max-batches-offpolicy of the environments",
    ),
    HealthyRange(
        "grpo/clipped_fraction",
        0.0,
        0.5,
        "the importance ratio of many tokens is outside the clipping range: lower --lr, lower "
        "--max-batches-offpolicy of the environments, or widen the range (--clip-eps), which is "
        "very narrow in --objective gspo",
    ),
    HealthyRange(
        "train/loss",
        -10.0,
        math.inf,
        "importance ratios or advantages are too large: check grpo/ratio_max, "
        "reward/std_in_group and the environment's scores",
    ),
)


@dataclass
class _Watch:
    """`outside`: number of steps in a row outside the range; `unreported`: number of steps outside
    since the last warning."""

    warned_at: int = -REPEAT_EVERY_STEPS
    outside: int = 0
    unreported: int = 0


class RangeWatch:
    """Warns when a value is outside its range for three steps in a row, then at most every 50
    steps. A single step is chance: one token with a large ratio is enough."""

    def __init__(self) -> None:
        self._watches = {healthy.metric: _Watch() for healthy in RANGES}

    def look(self, record: Mapping[str, float]) -> None:
        """Check one step's metrics. Those that are missing are not checked."""
        step = int(record["step"])
        for healthy in RANGES:
            value, watch = record.get(healthy.metric), self._watches[healthy.metric]
            if value is None:
                continue
            if healthy.low <= value <= healthy.high:
                watch.outside = 0
                continue
            watch.outside += 1
            watch.unreported += 1
            if watch.outside < STEPS_IN_A_ROW or step - watch.warned_at < REPEAT_EVERY_STEPS:
                continue
            log.warning(
                "metric.out_of_range",
                metric=healthy.metric,
                value=value,
                healthy=str(healthy),
                step=step,
                steps_outside_since_last_warning=watch.unreported,
                hint=healthy.look_at,
            )
            watch.warned_at, watch.unreported = step, 0
