"""Limits how long a service may fail, and how often it may refuse, until the environment ends."""

from __future__ import annotations

import time
from collections.abc import Callable

from grpo_core.errors import GrpoError, ServiceUnavailable

_MIN_DELAY_S = 0.2
_MAX_DELAY_S = 5.0
MAX_REFUSED_IN_A_ROW = 16


class EveryGroupRefused(GrpoError):
    """A service refused sixteen groups in a row, so an option is probably wrong."""


class FailureBudget:
    """Allows failures of one service for `deadline_s` seconds after the first one in a row.

    The HTTP clients already repeat requests that are safe to repeat. This budget covers the rest,
    such as a request that an engine restart interrupted. Each may last `deadline_s`, so the
    environment gives a service up after at most twice the deadline.
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
        """Record a failure.

        Raises:
            ServiceUnavailable: the service has failed for `deadline_s` seconds without a success.
        """
        self._last_failure = self._clock()
        if self._failing_since is None:
            self._failing_since = self._last_failure
        failing_s = self._last_failure - self._failing_since
        if failing_s >= self._deadline_s:
            raise ServiceUnavailable(
                f"{self._service} answered no request successfully for {round(failing_s, 1):g} "
                f"s; the last error was: {error}; read the log of {self._service}"
            ) from error

    @property
    def delay_s(self) -> float:
        """Seconds until the next request should be sent. Grows with the outage, up to a limit."""
        if self._failing_since is None:
            return 0.0
        failing_s = self._last_failure - self._failing_since
        pause_s = min(max(failing_s, _MIN_DELAY_S), _MAX_DELAY_S)
        return max(0.0, self._last_failure + pause_s - self._clock())


class RefusalLimit:
    """Distinguishes one refused group from a service that refuses every group."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._in_a_row = 0

    def accepted(self) -> None:
        self._in_a_row = 0

    def refused(self, detail: str) -> None:
        """Record a refusal.

        Raises:
            EveryGroupRefused: this was the sixteenth refusal in a row.
        """
        self._in_a_row += 1
        if self._in_a_row >= MAX_REFUSED_IN_A_ROW:
            raise EveryGroupRefused(
                f"{self._service} refused {self._in_a_row} groups in a row; the last reason "
                f"was: {detail}"
            )
