"""Warns if the first answers of a run all have the same score."""

from __future__ import annotations

from collections.abc import Iterable

import structlog

log = structlog.get_logger()

FIRST_GROUPS = 16


class FlatRewards:
    """Looks at the first groups, also at those that are dropped for their equal scores."""

    def __init__(self) -> None:
        self._groups = self._answers = 0
        self._scores: set[float] = set()

    def graded(self, scores: Iterable[float]) -> None:
        """Record the scores of one group."""
        found = [*scores]
        if self._groups >= FIRST_GROUPS or not found:
            return
        self._groups += 1
        self._answers += len(found)
        self._scores.update(found)
        if self._groups == FIRST_GROUPS and len(self._scores) == 1 < self._answers:
            log.warning(
                "rewards.all_equal",
                groups=self._groups,
                answers=self._answers,
                score=next(iter(self._scores)),
                hint="nothing can be learnt from equal scores: try the reward with `env-server "
                "check`. If the scores are right, the prompts are too easy or too hard",
            )
