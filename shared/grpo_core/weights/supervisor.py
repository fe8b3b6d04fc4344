"""Commands to the supervisor of the inference server: their records in Redis, and the client.

The keys have the run's prefix:

    server:commands         stream of limited length: `SupervisorCommand`s, the oldest first
    server:outcome:<id>     hash that expires: the `Outcome` of the command with that id
    server:status           hash: the `SupervisorStatus`, rewritten every second

Every command gets exactly one answer: done, refused (nothing has changed), or failed (the server
rolled back to the previous version, or serves nothing).
"""

from __future__ import annotations

import uuid
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field

from grpo_core.deadline import Deadline
from grpo_core.errors import GrpoError
from grpo_core.redis.connection import FAILURES, RedisConnection, words
from grpo_core.redis.keys import run_prefix
from grpo_core.weights.records import RedisRecord, VersionedRecord
from grpo_core.weights.ref import WeightKind, WeightRef

COMMANDS_KEPT = 1000
"""Length of the stream; older commands are deleted."""
OUTCOME_KEPT_S = 3600
STATUS_EVERY_S = 1.0
STATUS_STALE_S = 10.0
"""After this long without an update the supervisor counts as gone."""


def commands_key(run_id: str) -> str:
    return run_prefix(run_id) + "server:commands"


def outcome_key(run_id: str, command_id: str) -> str:
    return run_prefix(run_id) + f"server:outcome:{command_id}"


def status_key(run_id: str) -> str:
    return run_prefix(run_id) + "server:status"


class Action(StrEnum):
    LOAD_ADAPTER = "load_adapter"
    """Load into the running engine; requests in flight finish on the previous adapter."""
    RESTART_WITH_ADAPTER = "restart_with_adapter"
    RESTART_WITH_CHECKPOINT = "restart_with_checkpoint"

    @property
    def kind(self) -> WeightKind:
        if self is Action.RESTART_WITH_CHECKPOINT:
            return WeightKind.CHECKPOINT
        return WeightKind.ADAPTER

    @property
    def restarts(self) -> bool:
        return self is not Action.LOAD_ADAPTER


class SupervisorPhase(StrEnum):
    """The supervisor's state, in its status."""

    STARTING = "starting"
    """The first engine has not started yet."""
    SERVING = "serving"
    DRAINING = "draining"
    """New requests wait; requests in flight finish."""
    RESTARTING = "restarting"
    """No engine is running; new connections wait in the listening socket's queue."""
    FAILED = "failed"
    """No engine is running, and only a command starts one. Every request gets 503."""


class OutcomeState(StrEnum):
    ACCEPTED = "accepted"
    """The command was checked and is being carried out."""
    DONE = "done"
    """Every request from now on is answered by the new version."""
    REFUSED = "refused"
    """Nothing was changed; the previous version is still served."""
    BUSY = "busy"
    """Refused, because another command is being carried out or a newer one replaced it."""
    FAILED = "failed"
    """The command failed; the previous version is served again, or nothing is."""


class SupervisorCommand(VersionedRecord):
    """`id`: unique, chosen by the sender. `sha256`: `directory_digest` of `path`."""

    id: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\w-]+$")]
    action: Action
    path: Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    sender: Annotated[str, Field(max_length=256)] = ""
    """Name of the sending process, for messages."""

    @classmethod
    def to_serve(cls, weights: WeightRef, action: Action, sender: str) -> Self:
        """A command with a new id. `weights`: a directory with its digest."""
        return cls(
            id=uuid.uuid4().hex,
            action=action,
            **weights.version.fields(),
            path=str(weights.path),
            sha256=weights.digest,
            sender=sender,
        )

    @property
    def weights(self) -> WeightRef:
        kind, path = self.action.kind, Path(self.path)
        return WeightRef(version=self.version, kind=kind, path=path, digest=self.sha256)


class Outcome(RedisRecord):
    """The answer to a command.

    `reason`: why it was not carried out. `in_use`: after a `load_adapter` that is DONE, a JSON list
    of adapter directories that requests in flight still read. Their files must stay.
    """

    state: OutcomeState
    reason: str = ""
    in_use: str = "[]"


class SupervisorStatus(VersionedRecord):
    """The supervisor's last report. `dropped_requests`: requests aborted at the end of a drain.

    `epoch` and `step`: the version that is served, or that a starting engine will serve.
    """

    state: SupervisorPhase
    kind: WeightKind = WeightKind.BASE
    path: str = ""
    reason: str = ""
    """Why no weights are served."""
    restarts: int = 0
    """Engine starts after the first one, commanded or after a crash."""
    crashes: int = 0
    dropped_requests: int = 0
    generation_tokens: int = 0
    """Tokens sampled by all engines of this supervisor, counted by vLLM."""
    engine_pid: int = 0
    time: float = 0.0
    """Unix time in seconds, by the supervisor's clock."""

    @property
    def weights(self) -> WeightRef:
        """The served weights, without a digest."""
        path = Path(self.path) if self.path else None
        return WeightRef(version=self.version, kind=self.kind, path=path)


ATTEMPT_S = 5.0


class SupervisorClient(RedisConnection):
    """Retries every call while Redis is unreachable, until `deadline_s` has passed.

    Args:
        url: of Redis
        run_id: the run of the server; it may be set later

    Raises (every method):
        ServiceUnavailable: Redis did not answer in time.
        ProtocolViolation: a record in Redis is invalid.
    """

    def __init__(self, url: str, run_id: str, deadline_s: float) -> None:
        super().__init__(url, ATTEMPT_S, deadline_s)
        self.run_id = run_id

    def status(self) -> SupervisorStatus | None:
        """The supervisor's last status; None if it never wrote one."""
        fields = self.call("HGETALL", status_key(self.run_id))
        return SupervisorStatus.from_wire(fields) if fields else None

    def status_for_report(self) -> SupervisorStatus | None:
        """The same, but None if it is unreadable, so that a successful run does not fail."""
        try:
            return self.status()
        except GrpoError:
            return None

    def send(self, command: SupervisorCommand) -> None:
        """Add the command to the stream once; after a lost answer, check if it is there already.

        The supervisor would carry out a repeat too, and overwrite the first outcome.
        """
        key, fields = commands_key(self.run_id), words(command.on_the_wire())
        deadline = Deadline(self.deadline_s)
        while True:
            try:
                self.attempt("XADD", key, "MAXLEN", "~", COMMANDS_KEPT, "*", *fields)
                return
            except FAILURES as error:
                self.pause(deadline, error)
                if self.has(command):
                    return

    def has(self, command: SupervisorCommand) -> bool:
        """Whether the stream has the command. A crash of Redis may lose the last second."""
        return any(found.get("id") == command.id for found in self._commands())

    def outcome(self, command: SupervisorCommand) -> Outcome | None:
        """The answer to the command; None until the supervisor has read it."""
        fields = self.call("HGETALL", outcome_key(self.run_id, command.id))
        return Outcome.from_wire(fields) if fields else None

    def newest_epoch(self) -> int:
        """The highest epoch of all commands in the stream; 0 if it is empty.

        A trainer that was killed may have sent a command for a version that is not served yet.
        """
        epochs = [found.get("epoch", "") for found in self._commands()]
        return max((int(epoch) for epoch in epochs if epoch.isdecimal()), default=0)

    def _commands(self) -> list[dict[str, str]]:
        entries = self.call("XREVRANGE", commands_key(self.run_id), "+", "-")
        return [fields for _, fields in entries]
