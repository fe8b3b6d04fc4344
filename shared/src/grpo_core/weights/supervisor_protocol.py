"""How a trainer tells the inference server's supervisor which weights to serve next.

In Redis, under the run's prefix:

    server:commands         stream, bounded: one `Command` per entry, oldest first
    server:outcome:<id>     hash with an expiry: what became of the command of that id
    server:status           hash: what the supervisor does and serves, rewritten every second

A command is answered exactly once: done, refused (nothing has changed), or failed (the server went
back to the version before, or says that it could not).
"""

from __future__ import annotations

import uuid
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grpo_core.errors import ProtocolViolation
from grpo_core.redis.keys import run_prefix
from grpo_core.weights.ref import WeightKind, WeightRef
from grpo_core.wire.fields import Step
from grpo_core.wire.policy_version import PolicyVersion

COMMANDS_KEPT = 1000
"""Entries of the stream; older ones are trimmed."""
OUTCOME_KEPT_S = 3600
STATUS_EVERY_S = 1.0
STATUS_STALE_S = 10.0
"""A status that was not rewritten for so long is of a supervisor that is gone."""


def commands_key(run_id: str) -> str:
    return run_prefix(run_id) + "server:commands"


def outcome_key(run_id: str, command_id: str) -> str:
    return run_prefix(run_id) + f"server:outcome:{command_id}"


def status_key(run_id: str) -> str:
    return run_prefix(run_id) + "server:status"


class Action(StrEnum):
    LOAD_ADAPTER = "load_adapter"
    """Beside the running engine: requests in flight finish on the adapter before."""
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
    """`state` of the status."""

    STARTING = "starting"
    """The first engine is not up yet."""
    SERVING = "serving"
    DRAINING = "draining"
    """Nothing new is taken in; requests in flight finish."""
    RESTARTING = "restarting"
    """No engine; callers wait in the listening socket's queue."""
    FAILED = "failed"
    """No engine, and none is tried any more until a command asks for one: 503 for everybody."""


class OutcomeState(StrEnum):
    ACCEPTED = "accepted"
    """Checked and under way."""
    DONE = "done"
    """Every request that arrives from now on is answered by the new version."""
    REFUSED = "refused"
    """Nothing was changed: the version before keeps serving."""
    BUSY = "busy"
    """Refused, because another command is under way or a newer one took its place."""
    FAILED = "failed"
    """It was tried and did not work; the version before is served again, or nothing is."""


class _Fields(BaseModel):
    """A flat record, as a Redis hash or stream entry: every value a string."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    def on_the_wire(self) -> dict[str, str]:
        plain = self.model_dump(mode="json", exclude_none=True)
        return {name: str(value) for name, value in plain.items()}

    @classmethod
    def from_wire(cls, fields: dict[str, str]) -> Self:
        """Raises `ProtocolViolation` naming what does not fit."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in error.errors()
            )
            raise ProtocolViolation(f"{cls.__name__} in Redis: {problems}") from None


class Command(_Fields):
    """`id`: chosen by the sender, unique. `sha256`: `directory_digest` of `path`."""

    id: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\w-]+$")]
    action: Action
    epoch: Step
    step: Step
    path: Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    sender: Annotated[str, Field(max_length=256)] = ""
    """Who asks, for messages."""

    @classmethod
    def to_serve(cls, weights: WeightRef, action: Action, sender: str) -> Self:
        """A command with an id of its own. Args: weights: of a directory, with its digest."""
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
        version = PolicyVersion(self.epoch, self.step)
        return WeightRef(
            version=version, kind=self.action.kind, path=Path(self.path), digest=self.sha256
        )

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(self.epoch, self.step)


class Outcome(_Fields):
    """`reason`: why not; `in_use`: for DONE of `load_adapter`, a JSON list of adapter directories
    that requests in flight still read, whose files must stay."""

    state: OutcomeState
    reason: str = ""
    in_use: str = "[]"


class SupervisorStatus(_Fields):
    """What the supervisor last said of itself. `dropped_requests`: aborted at a drain's end.

    `epoch` and `step`: the version that is served, or that will be once the engine is up."""

    state: SupervisorPhase
    epoch: int
    step: int
    kind: WeightKind = WeightKind.BASE
    path: str = ""
    reason: str = ""
    """Why it is not serving."""
    restarts: int = 0
    """Engine starts after the first one, asked for or not."""
    crashes: int = 0
    dropped_requests: int = 0
    generation_tokens: int = 0
    """Sampled by all engines of this supervisor, by vLLM's own count."""
    engine_pid: int = 0
    time: float = 0.0
    """Seconds since the epoch, by the supervisor's clock."""

    @property
    def weights(self) -> WeightRef:
        """Without a digest."""
        path = Path(self.path) if self.path else None
        return WeightRef(version=self.version, kind=self.kind, path=path)

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(self.epoch, self.step)
