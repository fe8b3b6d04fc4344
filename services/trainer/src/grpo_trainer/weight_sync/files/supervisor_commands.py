"""Asks the supervisor to serve a directory of weights until it does."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import structlog

from grpo_core.clients.supervisor import SupervisorClient
from grpo_core.deadline import Deadline
from grpo_core.errors import ProtocolViolation
from grpo_core.weights.ref import WeightRef
from grpo_core.weights.supervisor_protocol import (
    Action,
    Command,
    Outcome,
    OutcomeState,
    SupervisorPhase,
)
from grpo_trainer.errors import NotPublished, WeightsRefused
from grpo_trainer.weight_sync.files.server_monitor import POLL_S, ServerMonitor, describe

log = structlog.get_logger()

FIRST_RETRY_S, MAX_RETRY_S = 0.5, 5.0
LOST_AFTER_S = 15.0
"""A command that nobody has answered for so long, while the server serves something else, was lost
with the last second of a Redis or with a supervisor."""


@dataclass(frozen=True)
class Publisher:
    """Args:
    supervisor: takes the commands
    monitor: of its server
    action: how the server takes new weights
    deadline_s: how long it may take, with everything that goes wrong on the way
    """

    supervisor: SupervisorClient
    monitor: ServerMonitor
    action: Action
    deadline_s: float

    def publish(self, weights: WeightRef) -> frozenset[Path]:
        """Return once every request that arrives is answered by these weights.

        Returns:
            Directories that requests in flight still read, whose files must stay.

        Raises:
            WeightsRefused: the server takes no such weights; it serves those before.
            NotPublished: it tried until the deadline.
            LostServer: nobody is there to ask.
        """
        deadline = Deadline(self.deadline_s)
        retry_s = FIRST_RETRY_S
        while True:
            sender = f"trainer {os.getpid()} on {socket.gethostname()}"[:256]
            command = Command.to_serve(weights, self.action, sender)
            self.supervisor.send(command)
            outcome = self._outcome_of(command, deadline)
            if outcome.state is OutcomeState.DONE:
                return _directories(outcome)
            if self._is_served(weights):  # asked for by a command whose answer was lost
                return frozenset()
            reason = f"{outcome.state}: {outcome.reason}"
            if outcome.state is OutcomeState.REFUSED:
                raise WeightsRefused(
                    f"the server refuses version {tuple(weights.version)} in {weights.path}: "
                    f"{outcome.reason}. It goes on serving the version before"
                )
            if deadline.left_s <= retry_s:
                raise self._not_published(weights, reason)
            log.warning("asking the server again", version=tuple(weights.version), reason=reason)
            time.sleep(retry_s)
            retry_s = min(2 * retry_s, MAX_RETRY_S)

    def _outcome_of(self, command: Command, deadline: Deadline) -> Outcome:
        """The final one, or BUSY where the command was lost."""
        lost = Deadline(LOST_AFTER_S)
        while True:
            outcome = self.supervisor.outcome(command)
            if outcome is not None and outcome.state is not OutcomeState.ACCEPTED:
                return outcome
            if self._is_lost(command, lost):
                return Outcome(state=OutcomeState.BUSY, reason="nobody answered the command")
            if deadline.has_passed:
                seen = "taken up" if outcome else "not seen"
                raise self._not_published(
                    command.weights,
                    f"the command was {seen} and not answered; {describe(self.monitor.status())}",
                )
            time.sleep(POLL_S)

    def _is_lost(self, command: Command, lost: Deadline) -> bool:
        """Raises `LostServer` where no supervisor is there for too long."""
        status = self.monitor.status()
        if status is None:
            self.monitor.note_absence(status)
        else:
            self.monitor.note_presence()
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
            f"version {tuple(weights.version)} is not served after {self.deadline_s:g} s "
            f"({reason}). Read the server's log; raise --publish-deadline-s where it only needs "
            "longer. Started again, the trainer goes on from the last state that it saved"
        )


def _directories(outcome: Outcome) -> frozenset[Path]:
    try:
        return frozenset(Path(path).resolve() for path in json.loads(outcome.in_use))
    except (ValueError, TypeError) as error:
        raise ProtocolViolation(f"outcome in Redis: in_use is {outcome.in_use!r}") from error
