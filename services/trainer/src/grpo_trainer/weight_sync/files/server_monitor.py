"""Is the inference server there? By what its supervisor says, which it does every second."""

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
    supervisor: of the server
    return_deadline_s: how long the server may be away before `LostServer`
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
        """None where nobody has said anything for 10 s.

        Whether it is rewritten counts, not the time in it, which is that of another clock.
        """
        status, now = self._supervisor.status(), self._clock()
        self._asked_at = now
        if status is None:
            return None
        if status.time != self._said_at:
            self._said_at, self._heard_at = status.time, now
        return status if now - self._heard_at < STATUS_STALE_S else None

    def look(self) -> None:
        """At most once a second: where the server is away, wait for its return.

        Raises:
            LostServer: it did not come back in time.
            ServiceUnavailable: Redis is away for longer than it may.
        """
        if self._clock() - self._asked_at >= STATUS_EVERY_S:
            self.await_serving()

    def await_serving(self) -> SupervisorStatus:
        """Raises as `look`."""
        waited = False
        while True:
            status = self.status()
            if status is not None and status.state is SupervisorPhase.SERVING:
                self.note_presence()
                if waited:
                    log.info("the inference server serves again", version=tuple(status.version))
                return status
            if not waited:
                log.warning("waiting for the inference server", reason=describe(status))
                waited = True
            self.note_absence(status)
            time.sleep(POLL_S)

    def note_presence(self) -> None:
        """It is there, in whatever state."""
        self._return_deadline = None

    def note_absence(self, status: SupervisorStatus | None) -> None:
        """Args: status: what it said last, for the message.

        Raises:
            LostServer: its absence was noted first too long ago.
        """
        if self._return_deadline is None:
            self._return_deadline = Deadline(self._return_deadline_s, self._clock)
        elif self._return_deadline.has_passed:
            raise LostServer(
                f"the inference server of run {self._supervisor.run_id!r} was away for "
                f"{self._return_deadline_s:g} s ({describe(status)}). Read its log, start it again "
                "with the --redis-url and --run-id of the trainer, then the trainer"
            )


def describe(status: SupervisorStatus | None) -> str:
    if status is None:
        return "its supervisor says nothing in Redis"
    return f"{status.state}: {status.reason}" if status.reason else status.state.value
