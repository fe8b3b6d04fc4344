"""What the store answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

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
class SubmissionRefused:
    """Which group of a submission can never be served, and why. Nothing of it was queued."""

    index: int
    reason: str


@dataclass(frozen=True)
class RegisteredEnvironment:
    env_id: int
    name: str
    step: int
    trainer: Registration
