"""How often, and how soon, an engine that ended is started again. Pure, but for the clock."""

from __future__ import annotations

import time
from collections.abc import Callable

from grpo_core.wire import PolicyVersion

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0
STABLE_AFTER_S = 60.0
"""An engine that has served for so long ends a series of failures."""


class RestartPolicy:
    """Args: limit: failures in a row after which nothing is tried any more."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._failures = 0
        self._serving_since: float | None = None
        self._served: PolicyVersion | None = None

    @property
    def failures(self) -> int:
        return self._failures

    def serving(self) -> None:
        """An engine is up."""
        self._serving_since = self._clock()

    def delay_after_failure(self, served: PolicyVersion) -> float | None:
        """Seconds to wait after an engine ended or did not come up; None to give up.

        1, 2, 4, … seconds, at most 30.

        Args: served: last; newer weights than at the failure before end a series too.
        """
        since, self._serving_since = self._serving_since, None
        is_stable = since is not None and self._clock() - since >= STABLE_AFTER_S
        if is_stable or (self._served is not None and served > self._served):
            self._failures = 0
        self._served = served
        self._failures += 1
        if self._failures >= self._limit:
            return None
        return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** (self._failures - 1))

    def forget(self) -> None:
        """Somebody asked for other weights: what failed before says nothing about them."""
        self._failures = 0
