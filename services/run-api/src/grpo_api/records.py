"""What the store answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from grpo_api.placement import IntakeState
from grpo_core.wire import Registration


@dataclass(frozen=True)
class LeasedBatch:
    """A batch handed out. `again`: it was handed out before, and its step is counted."""

    step: int
    sequences: int
    payloads: list[bytes]
    again: bool


@dataclass(frozen=True)
class OpenPoll:
    """A poll that waits for a plan, under the trainer and the batch size it began with."""

    poll: str
    trainer_id: bytes
    batch_size: int


class LeaseLost(Enum):
    """Why a plan could not be committed."""

    MOVED = "moved"
    SUPERSEDED = "superseded"


@dataclass(frozen=True)
class OpenIntake:
    """A submission that waits to be placed: under which trainer, its groups' ids, what it meets."""

    trainer_id: bytes
    first_id: int
    state: IntakeState


@dataclass(frozen=True)
class Registered:
    """A trainer's id (128 bits) and the step that the run is at."""

    trainer_id: int
    step: int


@dataclass(frozen=True)
class BatchSizeDiffers:
    """The run goes by another batch size; `fingerprint` names the state this was found in."""

    current: int
    batch_is_leased: bool
    fingerprint: bytes


@dataclass(frozen=True)
class RegisteredEnvironment:
    env_id: int
    name: str
    step: int
    trainer: Registration
