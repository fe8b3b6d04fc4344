"""Commands the supervisor to serve a directory of weights, and retries failed commands."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import structlog

from grpo_core.deadline import Deadline
from grpo_core.errors import ProtocolViolation
from grpo_core.weights.directory_checks import directory_digest
from grpo_core.weights.ref import WeightKind, WeightRef
from grpo_core.weights.supervisor import (
    Action,
    Command,
    Outcome,
    OutcomeState,
    SupervisorClient,
    SupervisorPhase,
)
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.atomic_files import make_directory, remove_directory, remove_unfinished
from grpo_trainer.config.sync import SERVED_KEPT
from grpo_trainer.errors import CheckpointNotSaved, NotPublished, WeightsRefused
from grpo_trainer.weight_sync.server import POLL_S, ServerMonitor, describe

log = structlog.get_logger()

FIRST_RETRY_S, MAX_RETRY_S = 0.5, 5.0
LOST_AFTER_S = 15.0
"""A command without an answer for this long is lost if the server serves other weights: Redis or
the supervisor restarted and lost it."""


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
            command = Command.to_serve(weights, self.action, sender)
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

    def _outcome_of(self, command: Command, deadline: Deadline) -> Outcome:
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

    def _is_lost(self, command: Command, lost: Deadline) -> bool:
        """Raises `LostServer` if the supervisor is down for too long."""
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


_NAME = re.compile(r"epoch_(\d+)_step_(\d+)")


class WeightDirectories:
    """Args: root: the server's --weights-dir"""

    def __init__(self, root: Path) -> None:
        self.root = root

    def prepare(self) -> None:
        """Create the root, and remove unfinished directories of a trainer that was killed."""
        make_directory(self.root)
        remove_unfinished(self.root)

    def write(
        self, version: PolicyVersion, kind: WeightKind, write_to: Callable[[Path], None]
    ) -> WeightRef:
        """Args: write_to: writes a complete directory at its argument.

        Raises:
            CheckpointNotSaved: the directory could not be written, e.g. the disk is full.
        """
        target = self.root / f"epoch_{version.epoch}_step_{version.step}"
        write_to(target)
        try:
            digest = directory_digest(target)
        except OSError as error:
            raise CheckpointNotSaved(
                f"{target} was written and cannot be read: {error}; check the disk"
            ) from error
        return WeightRef(version=version, kind=kind, path=target, digest=digest)

    def remove_older(self, in_use: Collection[Path]) -> None:
        """Remove all but the newest two and those in use.

        Args:
            in_use: resolved paths that requests in flight still read
        """
        for _, path in sorted(self._versions())[:-SERVED_KEPT]:
            if path.resolve() not in in_use:
                remove_directory(path)

    def newest_epoch(self) -> int:
        """The newest epoch that has a directory, or 0."""
        return max((version.epoch for version, _ in self._versions()), default=0)

    def _versions(self) -> list[tuple[PolicyVersion, Path]]:
        if not self.root.is_dir():
            return []
        found = ((_NAME.fullmatch(path.name), path) for path in self.root.iterdir())
        return [(PolicyVersion(int(m[1]), int(m[2])), path) for m, path in found if m]
