"""Records of one sampled group: how it is sampled, what came of it, and why it was lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from grpo_core.clients.inference import Completion
from grpo_core.wire.scored_group import ScoredGroup
from grpo_env.rollout.grading import Grade
from grpo_env.rollout.training_sequences import TrainingSequence
from grpo_env.tasks import Answer, Message, Task

STOPPED, CUT_OFF = "stop", "length"
_LEAST_ROOM = 4
"""A completion without a limit of its own needs this part of the sequence."""
FINISHED = frozenset({STOPPED, CUT_OFF})


class FailureReason(StrEnum):
    """Why a group was not added to the queue."""

    TOO_LONG = "too_long"
    EQUAL_SCORES = "equal_scores"
    QUARANTINED_REWARD = "quarantined_reward"
    ABORTED = "aborted"
    REFUSED = "refused"
    UNAVAILABLE = "unavailable"
    UNDELIVERED = "undelivered"


@dataclass(frozen=True)
class SamplingPlan:
    """How to sample groups. Lengths are in tokens; a sequence must be below `max_token_length`.

    max_completion_tokens: of one completion; None for the task's own limit.
    reshaping: parameters that make tokens more or less likely than at `temperature`, by their names
        at the server.
    start_completion_tokens: the limit at the first training step, from which it grows linearly.
    progress: share of the training steps that are done, in [0, 1].
    max_sequences: largest number of sequences of one rollout. A group has this number of sequences
        for each of its rollouts.
    mask_cut_off: give sequences that the token limit cut off an advantage of zero.
    """

    group_size: int
    temperature: float
    max_token_length: int
    max_completion_tokens: int | None
    drop_equal_scores: bool
    max_sequences: int = 1
    reshaping: Mapping[str, float] = field(default_factory=dict)
    mask_cut_off: bool = False
    start_completion_tokens: int | None = None
    progress: float = 1.0

    @property
    def sampling(self) -> dict[str, float]:
        """The server's parameters for a completion, but for its length."""
        return {"temperature": self.temperature, **self.reshaping}

    def completion_limit(self, task: Task, room: int) -> int:
        """Tokens that a completion of the task may have now, with `room` tokens left."""
        most = min(self.max_completion_tokens or task.max_completion_tokens or room, room)
        start = self.start_completion_tokens
        if start is None or start >= most:
            return most
        return round(start + (most - start) * min(self.progress, 1.0))

    def longest_prompt(self, task: Task) -> int:
        """Tokens of a prompt that leave room for a whole completion."""
        most = self.max_completion_tokens or task.max_completion_tokens
        return self.max_token_length - (most or self.max_token_length // _LEAST_ROOM) - 1


@dataclass(frozen=True)
class Sample:
    """One rollout: a completion, or a conversation with several.

    messages: the conversation of each sequence, the policy's answers included.
    answer: the last answer, which is graded.
    """

    sequences: tuple[TrainingSequence, ...]
    messages: tuple[list[Message], ...]
    answer: Answer

    @property
    def completion_tokens(self) -> int:
        return sum(len(sequence.sampled_ids) for sequence in self.sequences)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(len(sequence.tokens) for sequence in self.sequences)


@dataclass(frozen=True)
class Rollout:
    """A group that is ready to submit, except for the environment's id.

    samples, grades: one for each rollout of the group.
    """

    group: ScoredGroup
    samples: tuple[Sample, ...]
    grades: tuple[Grade, ...]

    @property
    def completion_tokens(self) -> int:
        return sum(sample.completion_tokens for sample in self.samples)


@dataclass(frozen=True)
class RolloutFailure:
    """A group that is not submitted. `samples`, `grades`: as far as it was sampled and graded;
    `group`: what would have been submitted, if every answer has a grade."""

    reason: FailureReason
    detail: str
    grades: tuple[Grade, ...] = ()
    completion_tokens: int = 0
    samples: tuple[Sample, ...] = ()
    group: ScoredGroup | None = None


class GroupLost(Exception):
    """Ends the sampling of a group; becomes a `RolloutFailure`."""

    def __init__(self, reason: FailureReason, detail: str, completion_tokens: int = 0) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.completion_tokens = completion_tokens


def raise_if_aborted(completions: Sequence[Completion]) -> None:
    """The text of an aborted completion is not the policy's whole answer.

    Raises:
        GroupLost: the server ended a completion before its end.
    """
    reasons = sorted({completion.finish_reason for completion in completions} - FINISHED)
    if reasons:
        raise GroupLost(
            FailureReason.ABORTED,
            f"the server ended a completion with finish reason {', '.join(reasons)}",
            sum(len(completion.token_ids) for completion in completions),
        )
