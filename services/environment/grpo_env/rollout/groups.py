"""One sampled group: how it is sampled, its sequences, what came of it, and what is submitted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from grpo_core.clients.inference import Completion
from grpo_core.errors import GrpoError
from grpo_core.wire.fields import MASKED, PROMPT_LOGPROB
from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.scored_group import PADDING, ROLLOUT, RolloutFacts, ScoredGroup
from grpo_env.rollout.grading import Grade
from grpo_env.tasks import Answer, Message, Task
from grpo_env.tasks.items import Item

LOGPROB_SLACK = 1e-6
"""Rounding may report a probability of 1 as a logprob this far above 0."""

PADDING_TOKENS = 2


class MisalignedCompletion(GrpoError):
    """A completion's tokens and logprobs cannot be trained on. The message lists every problem."""


@dataclass
class TrainingSequence:
    """One sequence that grows with a conversation. The lists have one entry per token [T]."""

    tokens: list[int] = field(default_factory=list)
    masks: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampled_ids: list[int] = field(default_factory=list)
    """All tokens that the policy sampled."""
    first_version: PolicyVersion | None = None
    last_version: PolicyVersion | None = None
    finish_reason: str = "stop"

    def add_prompt(self, token_ids: Sequence[int]) -> Self:
        """Add tokens that the policy did not sample."""
        self.tokens += token_ids
        self.masks += [MASKED] * len(token_ids)
        self.logprobs += [PROMPT_LOGPROB] * len(token_ids)
        return self

    def add_completion(self, completion: Completion) -> Self:
        """Raises `MisalignedCompletion`."""
        raise_if_misaligned(self.tokens, [completion])
        self.tokens += completion.token_ids
        self.masks += completion.token_ids
        self.logprobs += completion.logprobs
        self.sampled_ids += completion.token_ids
        self.first_version = self.first_version or completion.first_version
        self.last_version = completion.last_version
        self.finish_reason = completion.finish_reason
        return self

    def as_padding(self) -> TrainingSequence:
        """A short sequence on which nothing is trained. It fills up a group whose rollouts have
        different numbers of sequences, because run-api queues groups of one size."""
        padding = TrainingSequence(
            first_version=self.first_version, last_version=self.last_version, finish_reason=PADDING
        )
        return padding.add_prompt(self.tokens[:PADDING_TOKENS])


def sequences_of(
    prompt_ids: Sequence[int], completions: Sequence[Completion]
) -> list[TrainingSequence]:
    """One sequence for each completion of a prompt.

    Raises:
        MisalignedCompletion: empty prompt or completion, lists of different lengths, or a
            logprob that is not a finite number of at most 0.
    """
    raise_if_misaligned(prompt_ids, completions)
    return [TrainingSequence().add_prompt(prompt_ids).add_completion(c) for c in completions]


def wire_fields(sequences: Iterable[TrainingSequence]) -> dict[str, list[list[Any]]]:
    """The fields of a `ScoredGroup` that hold one list [T] per sequence."""
    rows = [*sequences]
    return {
        "tokens": [row.tokens for row in rows],
        "masks": [row.masks for row in rows],
        "inference_logprobs": [row.logprobs for row in rows],
    }


def raise_if_misaligned(prompt_ids: Sequence[int], completions: Sequence[Completion]) -> None:
    problems = [] if prompt_ids else ["the prompt has no tokens"]
    for index, completion in enumerate(completions):
        problems += [f"completion {index}: {problem}" for problem in _problems(completion)]
    if problems:
        raise MisalignedCompletion(
            "vllm-server: /generate sent an answer that cannot be trained on: "
            + "; ".join(problems)
        )


def _problems(completion: Completion) -> list[str]:
    problems = [] if completion.token_ids else ["no tokens"]
    if len(completion.logprobs) != len(completion.token_ids):
        problems.append(
            f"{len(completion.logprobs)} logprobs for {len(completion.token_ids)} tokens"
        )
    problems += [
        f"invalid logprob {logprob} at token {position}"
        for position, logprob in enumerate(completion.logprobs)
        if not (math.isfinite(logprob) and logprob <= LOGPROB_SLACK)
    ]
    return problems


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


def scored_group(
    item: Item,
    samples: Sequence[Sample],
    grades: Sequence[Grade],
    plan: SamplingPlan,
    seconds: float,
) -> ScoredGroup:
    """The group without the environment's id.

    Every rollout has `plan.max_sequences` sequences, all with the rollout's score; those that it
    lacks are padding.

    Args: seconds: that the sampling took
    """
    rows = [*_rows(samples, grades, plan)]
    facts = RolloutFacts(
        policy_version=[(s.first_version, s.last_version) for s, *_ in rows],
        generation_seconds=seconds,
    )
    params: dict[str, Any] = {**plan.sampling}
    if not item.task.is_conversation and not item.task.drives_itself:
        params["max_tokens"] = samples[0].answer.max_tokens
    return ScoredGroup(
        **wire_fields(sequence for sequence, *_ in rows),
        scores=[score for *_, score, _ in rows],
        messages=[[*map(dict, messages)] for _, messages, *_ in rows],
        overrides=[override for *_, override in rows],
        generation_params=params,
        group_overrides=facts.on_the_wire() | {"task": item.task.name, "item": item.key},
    )


def _rows(
    samples: Sequence[Sample], grades: Sequence[Grade], plan: SamplingPlan
) -> Iterator[tuple[TrainingSequence, list[Message], float, dict[str, Any]]]:
    for index, (sample, grade) in enumerate(zip(samples, grades, strict=True)):
        missing = plan.max_sequences - len(sample.sequences)
        padding = [sample.sequences[0].as_padding()] * missing
        messages: list[list[Message]] = [*sample.messages, *([[]] * missing)]
        for sequence, conversation in zip([*sample.sequences, *padding], messages, strict=True):
            yield sequence, conversation, grade.score, _override(index, sequence, grade, plan)


def _override(
    rollout: int, sequence: TrainingSequence, grade: Grade, plan: SamplingPlan
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "reward_parts": dict(grade.parts),
        "finish_reason": sequence.finish_reason,
        ROLLOUT: rollout,
    }
    if grade.reason:
        found["grade_reason"] = grade.reason
    if plan.mask_cut_off and sequence.finish_reason != STOPPED:
        found["set_advantage_to_zero"] = True
    return found
