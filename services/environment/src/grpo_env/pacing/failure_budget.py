"""How long a service may fail, and how often it may refuse, before the environment gives up."""

from __future__ import annotations

import time
from collections.abc import Callable

from grpo_core.errors import GrpoError, ServiceUnavailable

_MIN_DELAY_S = 0.2
_MAX_DELAY_S = 5.0
MAX_REFUSED_IN_A_ROW = 16


class EveryGroupRefused(GrpoError):
    """A service refuses whatever this environment sends: a wrong setting, not a bad rollout."""


class FailureBudget:
    """Allows failures of one service for `deadline_s` seconds after the first in a row.

    The clients repeat what may be repeated by themselves; this counts what they could not mend,
    such as a request that broke in the middle of an engine restart. Both may wait for the same
    deadline, so a service that is gone is given up after twice the deadline at the latest.
    """

    def __init__(
        self, service: str, deadline_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._service = service
        self._deadline_s = deadline_s
        self._clock = clock
        self._failing_since: float | None = None
        self._last_failure = 0.0

    def succeeded(self) -> None:
        self._failing_since = None

    def failed(self, error: ServiceUnavailable) -> None:
        """Note a failure.

        Raises:
            ServiceUnavailable: nothing has succeeded for `deadline_s` seconds.
        """
        self._last_failure = self._clock()
        if self._failing_since is None:
            self._failing_since = self._last_failure
        failing_s = self._last_failure - self._failing_since
        if failing_s >= self._deadline_s:
            raise ServiceUnavailable(
                f"{self._service} failed for {round(failing_s, 1):g} s in a row, the last time "
                f"with: {error}; read its log"
            ) from error

    @property
    def delay_s(self) -> float:
        """Seconds to leave the service alone from now; grows with the outage up to a bound."""
        if self._failing_since is None:
            return 0.0
        failing_s = self._last_failure - self._failing_since
        pause_s = min(max(failing_s, _MIN_DELAY_S), _MAX_DELAY_S)
        return max(0.0, self._last_failure + pause_s - self._clock())


class RefusalLimit:
    """Tells a refused group from a service that refuses every group."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._in_a_row = 0

    def accepted(self) -> None:
        self._in_a_row = 0

    def refused(self, detail: str) -> None:
        """Note a refusal.

        Raises:
            EveryGroupRefused: this was the sixteenth without an acceptance between them.
        """
        self._in_a_row += 1
        if self._in_a_row >= MAX_REFUSED_IN_A_ROW:
            raise EveryGroupRefused(
                f"{self._in_a_row} groups in a row refused for {self._service}, the last with: "
                f"{detail}"
            )
