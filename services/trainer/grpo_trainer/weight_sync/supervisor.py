"""Watches the server's supervisor, and commands it to serve a directory of weights."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from grpo_core.deadline import Deadline
from grpo_core.errors import ProtocolViolation
from grpo_core.weights.ref import WeightRef
from grpo_core.weights.supervisor import (
    STATUS_EVERY_S,
    STATUS_STALE_S,
    Action,
    Outcome,
    OutcomeState,
    SupervisorClient,
    SupervisorCommand,
    SupervisorPhase,
    SupervisorStatus,
)
from grpo_trainer.errors import LostServer, NotPublished, WeightsRefused
from grpo_trainer.weight_sync.base import POLL_S

log = structlog.get_logger()

FIRST_RETRY_S, MAX_RETRY_S = 0.5, 5.0
LOST_AFTER_S = 15.0
"""A command without an answer for this long is lost if the server serves other weights: Redis or
the supervisor restarted and lost it."""


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
                self.note(status, is_up=True)
                if waited:
                    log.info("server.available_again", policy_version=tuple(status.version))
                return status
            if not waited:
                log.warning("server.unavailable", reason=describe(status))
                waited = True
            self.note(status, is_up=False)
            time.sleep(POLL_S)

    def note(self, status: SupervisorStatus | None, is_up: bool) -> None:
        """Record whether the server is up. Args: status: the last one reported, for the message

        Raises:
            LostServer: it is down for longer than the deadline.
        """
        if is_up:
            self._return_deadline = None
        elif self._return_deadline is None:
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


@dataclass(frozen=True)
class Publisher:
    """Args:
    supervisor: receives the commands
    monitor: watches its status
    action: how the server loads new weights
    deadline_s: time limit of one publication, retries included
    """

    supervisor: SupervisorClient
    monitor: ServerMonitor
    action: Action
    deadline_s: float

    def publish(self, weights: WeightRef) -> frozenset[Path]:
        """Return once the server answers every new request with these weights.

        Returns:
            Directories that requests in flight still read; their files must stay.

        Raises:
            WeightsRefused: the server refuses the weights and serves the previous ones.
            NotPublished: the server did not succeed before the deadline.
            LostServer: the supervisor is down.
        """
        deadline = Deadline(self.deadline_s)
        retry_s = FIRST_RETRY_S
        while True:
            sender = f"trainer {os.getpid()} on {socket.gethostname()}"[:256]
            command = SupervisorCommand.to_serve(weights, self.action, sender)
            self.supervisor.send(command)
            outcome = self._outcome_of(command, deadline)
            if outcome.state is OutcomeState.DONE:
                return _directories(outcome)
            if self._is_served(weights):  # the answer to an earlier command was lost
                return frozenset()
            reason = f"{outcome.state}: {outcome.reason}"
            if outcome.state is OutcomeState.REFUSED:
                raise WeightsRefused(
                    f"the server refuses policy version {tuple(weights.version)} in "
                    f"{weights.path}: {outcome.reason}. The server keeps serving the previous "
                    "weights"
                )
            if deadline.left_s <= retry_s:
                raise self._not_published(weights, reason)
            log.warning("publication.retried", policy_version=tuple(weights.version), reason=reason)
            time.sleep(retry_s)
            retry_s = min(2 * retry_s, MAX_RETRY_S)

    def _outcome_of(self, command: SupervisorCommand, deadline: Deadline) -> Outcome:
        """The final outcome, or BUSY if the command was lost."""
        lost = Deadline(LOST_AFTER_S)
        while True:
            outcome = self.supervisor.outcome(command)
            if outcome is not None and outcome.state is not OutcomeState.ACCEPTED:
                return outcome
            if self._is_lost(command, lost):
                return Outcome(state=OutcomeState.BUSY, reason="the supervisor lost the command")
            if deadline.has_passed:
                not_done = "accepted, but not completed," if outcome else "not accepted"
                raise self._not_published(
                    command.weights,
                    f"the supervisor has {not_done} the command to serve the weights; "
                    f"the server's state: {describe(self.monitor.status())}",
                )
            time.sleep(POLL_S)

    def _is_lost(self, command: SupervisorCommand, lost: Deadline) -> bool:
        """Raises `LostServer` if the supervisor is down for too long."""
        status = self.monitor.status()
        self.monitor.note(status, is_up=status is not None)  # whatever the server's state is
        if status is None or not lost.has_passed:
            return False
        return status.state is SupervisorPhase.SERVING and not self.supervisor.has(command)

    def _is_served(self, weights: WeightRef) -> bool:
        status = self.monitor.status()
        return (
            status is not None
            and status.state is SupervisorPhase.SERVING
            and status.version == weights.version
            and Path(status.path).resolve() == Path(str(weights.path)).resolve()
        )

    def _not_published(self, weights: WeightRef, reason: str) -> NotPublished:
        return NotPublished(
            f"policy version {tuple(weights.version)} is not served after {self.deadline_s:g} s "
            f"({reason}). Read the server's log; if the server only needs more time, raise "
            "--publish-deadline-s. Start the trainer again to resume from its newest "
            "checkpoint"
        )


def _directories(outcome: Outcome) -> frozenset[Path]:
    try:
        return frozenset(Path(path).resolve() for path in json.loads(outcome.in_use))
    except (ValueError, TypeError) as error:
        raise ProtocolViolation(
            f"the supervisor's answer in Redis has in_use={outcome.in_use!r}; expected a JSON list "
            "of directories"
        ) from error
