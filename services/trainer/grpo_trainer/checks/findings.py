"""Logs the findings of checks whose evidence does not end the run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import structlog

log = structlog.get_logger()

REPEAT_EVERY_STEPS = 50
"""Minimum number of steps between two warnings of one check about one environment."""


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
    OTHER_TOKENS = "other_tokens"
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
    """Warns of findings: of each check and environment at most every 50 steps."""

    def __init__(self) -> None:
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
