"""What the store answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from grpo_api.planning.submission import IntakeState
from grpo_api.store.group_codec import PackedGroup
from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.run_api import Registration


@dataclass(frozen=True)
class Lease:
    """A batch that was handed out and is not acknowledged.

    Attributes:
        age_at_lease_s: how long its oldest group had been queued when the batch was formed.
        group_ids: in the order that they are served in.
        received_under: for each of them the version that was served when it was received.
    """

    batch_id: int
    step: int
    sequences: int
    age_at_lease_s: float
    group_ids: tuple[int, ...]
    received_under: tuple[PolicyVersion | None, ...]


@dataclass(frozen=True)
class DueBatch:
    """A batch to be handed out to a trainer.

    Attributes:
        answer: name of the answer that it is sent in; '' where it is leased.
        again: it was formed by a poll before.
    """

    answer: str
    lease: Lease
    again: bool


@dataclass(frozen=True)
class Poll:
    """What a trainer says when it asks for a batch.

    Attributes:
        trainer_id: None for a trainer that cannot acknowledge. It holds what was delivered.
        after: id of the last batch that it holds; of no meaning without `trainer_id`.
        batches_left: how many the run needs after that; None where it does not say.
        answer: without `trainer_id`, name of the answer that the batch is to be sent in.
    """

    trainer_id: int | None = None
    after: int = 0
    batches_left: int | None = None
    answer: str = ""


@dataclass(frozen=True)
class OpenPoll:
    """A poll that waits for a plan, under the trainer and the batch size it began with."""

    answer: str
    trainer_id: bytes
    batch_size: int
    batch_id: int


@dataclass(frozen=True)
class Acknowledged:
    """`batch_id`: of the last batch acknowledged so far; `released` by this call."""

    batch_id: int
    released: int


class PlanLost(Enum):
    """Why a plan could not be committed."""

    MOVED = "moved"
    SUPERSEDED = "superseded"


class NotPlaced(Enum):
    """Why a submission was not taken, this time."""

    MOVED = "moved"
    FULL = "full"
    PLAN = "plan"
    UNSTAGED = "unstaged"


Outcomes = list[int | None]
"""Of each group of a submission: the sequences that its environment has buffered after it, or None
where it was queued as it came."""


@dataclass(frozen=True)
class Submission:
    """Groups that are taken together or not at all.

    Attributes:
        key: the sender's own name for it, or None where only run-api itself may repeat it.
        fingerprint: of what was sent: tells a repeat from other groups under the same key.
        staged_prefix, staged: where their payloads were stored beforehand; '' and nothing where
            they are stored with the groups.
        received_under: the version that was served when they came, where they had to wait since;
            None: the one that is served now.
    """

    groups: Sequence[PackedGroup]
    key: str | None
    fingerprint: str
    staged_prefix: str = ""
    staged: Sequence[str] = ()
    received_under: PolicyVersion | None = None

    @property
    def stored_bytes(self) -> int:
        return sum(len(group.payload) for group in self.groups)

    def env_ids(self) -> list[int]:
        return sorted({group.env_id for group in self.groups if group.env_id is not None})

    def with_content(self) -> Iterator[tuple[PackedGroup, bytes | str]]:
        """Each group and its payload, or the name that it was staged under."""
        contents: Iterable[bytes | str] = self.staged or (group.payload for group in self.groups)
        return zip(self.groups, contents, strict=True)


@dataclass(frozen=True)
class OpenIntake:
    """A submission that waits to be placed: under which trainer, its groups' ids, what it meets.

    `served`: the version that the server says it serves, None where it has said nothing.
    """

    trainer_id: bytes
    first_id: int
    served: PolicyVersion | None
    state: IntakeState


@dataclass(frozen=True)
class Registered:
    """A trainer's id (128 bits), and the run: the step that it is at, and its uuid."""

    trainer_id: int
    step: int
    run_uuid: str


@dataclass(frozen=True)
class BatchSizeDiffers:
    """The run goes by another batch size; `fingerprint` names the state this was found in."""

    current: int
    unacknowledged: int
    fingerprint: bytes


@dataclass(frozen=True)
class RegisteredEnvironment:
    env_id: int
    name: str
    step: int
    trainer: Registration
