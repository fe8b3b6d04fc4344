"""Records that the store takes and returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from grpo_api.planning.placement import IntakeState
from grpo_api.store.keys import Lease
from grpo_api.store.payloads import PackedGroup
from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.run_api import Registration


@dataclass(frozen=True)
class DueBatch:
    """A batch to be sent to a trainer.

    Attributes:
        answer: name of the answer to a plain poll; '' for a leased batch.
        again: an earlier poll formed the batch.
    """

    answer: str
    lease: Lease
    again: bool


@dataclass(frozen=True)
class Poll:
    """A trainer's request for a batch.

    Attributes:
        trainer_id: None for a plain poll, which cannot acknowledge.
        after: id of the last batch that the trainer holds; ignored for a plain poll.
        batches_left: number of batches that the run needs after that; None if unknown.
        answer: name of the answer to a plain poll; '' otherwise.
    """

    trainer_id: int | None = None
    after: int = 0
    batches_left: int | None = None
    answer: str = ""


@dataclass(frozen=True)
class OpenPoll:
    """A poll that needs a new batch: the trainer, batch size and batch id to plan for."""

    answer: str
    trainer_id: bytes
    batch_size: int
    batch_id: int


@dataclass(frozen=True)
class Acknowledged:
    """`batch_id`: the last acknowledged batch. `released`: batches deleted by this call."""

    batch_id: int
    released: int


class PlanLost(Enum):
    """Why a plan could not be committed."""

    MOVED = "moved"
    SUPERSEDED = "superseded"


class NotPlaced(Enum):
    """Why an attempt did not accept a submission."""

    MOVED = "moved"
    FULL = "full"
    PLAN = "plan"
    UNSTAGED = "unstaged"


Outcomes = list[int | None]
"""For each group of a submission: the sequences in its environment's buffer afterwards, or None if
the group was queued directly."""


@dataclass(frozen=True)
class Submission:
    """Groups that are accepted together or not at all.

    Attributes:
        key: the sender's idempotency key, or None if it sent none.
        fingerprint: checksum of the body; distinguishes a repeat from other groups with that key.
        staged_prefix, staged: names of staged payloads; empty if the payloads are not staged.
        received_under: the version that was served when the groups arrived, if they had to wait;
            None stands for the version that is served now.
        run_uuid: the run for which the groups were sampled; "" if the sender does not say.
    """

    groups: Sequence[PackedGroup]
    key: str | None
    fingerprint: str
    staged_prefix: str = ""
    staged: Sequence[str] = ()
    received_under: PolicyVersion | None = None
    run_uuid: str = ""

    @property
    def stored_bytes(self) -> int:
        return sum(len(group.payload) for group in self.groups)

    def env_ids(self) -> list[int]:
        return sorted({group.env_id for group in self.groups if group.env_id is not None})

    def with_content(self) -> Iterator[tuple[PackedGroup, bytes | str]]:
        """Each group with its payload, or with the name of its staged payload."""
        contents: Iterable[bytes | str] = self.staged or (group.payload for group in self.groups)
        return zip(self.groups, contents, strict=True)


@dataclass(frozen=True)
class OpenIntake:
    """The start of a placement: the trainer, the first reserved group id and the run's state.

    `served`: the policy version that the server reports as served; None if it reports none.
    """

    trainer_id: bytes
    first_id: int
    served: PolicyVersion | None
    state: IntakeState


@dataclass(frozen=True)
class Registered:
    """A trainer's id (128 bits), and the step and uuid of its run."""

    trainer_id: int
    step: int
    run_uuid: str


@dataclass(frozen=True)
class BatchSizeDiffers:
    """The run uses another batch size. `fingerprint` identifies the state of the run."""

    current: int
    unacknowledged: int
    fingerprint: bytes


@dataclass(frozen=True)
class RegisteredEnvironment:
    env_id: int
    name: str
    step: int
    trainer: Registration
    run_uuid: str
