"""Watches whether the inference server is up, by the status that its supervisor writes to Redis."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from grpo_core.clients.supervisor import SupervisorClient
from grpo_core.deadline import Deadline
from grpo_core.weights.supervisor_protocol import (
    STATUS_EVERY_S,
    STATUS_STALE_S,
    SupervisorPhase,
    SupervisorStatus,
)
from grpo_trainer.errors import LostServer

log = structlog.get_logger()

POLL_S = 0.1


class ServerMonitor:
    """Args:
    supervisor: client of the server's supervisor
    return_deadline_s: how long the server may be down before `LostServer`
    """

    def __init__(
        self,
        supervisor: SupervisorClient,
        return_deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._supervisor = supervisor
        self._return_deadline_s = return_deadline_s
        self._clock = clock
        self._said_at = 0.0
        self._heard_at = -STATUS_STALE_S
        self._asked_at = -STATUS_EVERY_S
        self._return_deadline: Deadline | None = None

    def status(self) -> SupervisorStatus | None:
        """The supervisor's status; None if it was not rewritten for 10 s.

        The rewriting counts, not the time in the status, which comes from another clock.
        """
        status, now = self._supervisor.status(), self._clock()
        self._asked_at = now
        if status is None:
            return None
        if status.time != self._said_at:
            self._said_at, self._heard_at = status.time, now
        return status if now - self._heard_at < STATUS_STALE_S else None

    def look(self) -> None:
        """Wait for the server's return if it is down. Checks at most once a second.

        Raises:
            LostServer: it did not come back in time.
            ServiceUnavailable: Redis does not answer for longer than the deadline.
        """
        if self._clock() - self._asked_at >= STATUS_EVERY_S:
            self.await_serving()

    def await_serving(self) -> SupervisorStatus:
        """Wait until the server serves. Raises the errors of `look`."""
        waited = False
        while True:
            status = self.status()
            if status is not None and status.state is SupervisorPhase.SERVING:
                self.note_presence()
                if waited:
                    log.info("server.available_again", policy_version=tuple(status.version))
                return status
            if not waited:
                log.warning("server.unavailable", reason=describe(status))
                waited = True
            self.note_absence(status)
            time.sleep(POLL_S)

    def note_presence(self) -> None:
        """Record that the supervisor reports, whatever the server's state is."""
        self._return_deadline = None

    def note_absence(self, status: SupervisorStatus | None) -> None:
        """Record that the server is down.

        Args:
            status: the last one reported, for the message

        Raises:
            LostServer: it is down for longer than the deadline.
        """
        if self._return_deadline is None:
            self._return_deadline = Deadline(self._return_deadline_s, self._clock)
        elif self._return_deadline.has_passed:
            raise LostServer(
                f"the inference server of run {self._supervisor.run_id!r} has been down for "
                f"{self._return_deadline_s:g} s ({describe(status)}). Read the server's log, "
                "start the server again with the trainer's --redis-url and --run-id, then "
                "start the trainer again"
            )


def describe(status: SupervisorStatus | None) -> str:
    if status is None:
        return "its supervisor reports no status in Redis"
    return f"{status.state}: {status.reason}" if status.reason else status.state.value
