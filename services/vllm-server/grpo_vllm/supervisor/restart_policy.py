"""How long to wait before the next engine, and when to start no more."""

from __future__ import annotations

import time
from collections.abc import Callable

from grpo_core.wire.policy_version import PolicyVersion

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0
STABLE_AFTER_S = 60.0
"""An engine that has served for so long resets the count of failures."""


class RestartPolicy:
    """Counts failed engines. `limit`: failures in a row after which the supervisor gives up."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self.failures = 0
        self._serving_since: float | None = None
        self._served: PolicyVersion | None = None

    def serving(self) -> None:
        """Record that an engine serves."""
        self._serving_since = self._clock()

    def delay_after_failure(self, served: PolicyVersion) -> float | None:
        """Seconds to wait after an engine crashed or failed to start: 1, 2, 4, … up to 30. None
        means to give up.

        Args: served: the last served version. If it is newer than at the previous failure, the
            count of failures starts again.
        """
        since, self._serving_since = self._serving_since, None
        is_stable = since is not None and self._clock() - since >= STABLE_AFTER_S
        if is_stable or (self._served is not None and served > self._served):
            self.failures = 0
        self._served = served
        self.failures += 1
        if self.failures >= self._limit:
            return None
        return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** (self.failures - 1))

    def forget(self) -> None:
        """Reset the count of failures, because other weights were announced."""
        self.failures = 0
