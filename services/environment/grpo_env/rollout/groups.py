"""One sampled group: how it is sampled, its token sequences, what came of it, what is submitted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, Self

from grpo_core.clients.inference import Completion, GenerateAnswer
from grpo_core.errors import GrpoError, ProtocolViolation, RequestRefused
from grpo_core.wire.fields import LOGPROB_SLACK, MASKED, PROMPT_LOGPROB
from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.receipt import RECEIPT
from grpo_core.wire.scored_group import PADDING, ROLLOUT, RolloutFacts, ScoredGroup
from grpo_env.inference.server import Home
from grpo_env.rollout.grader import Grade
from grpo_env.tasks import Answer, Message, Task
from grpo_env.tasks.items import Item

STOPPED, CUT_OFF = "stop", "length"
_PADDING_TOKENS = 2
_LEAST_ROOM = 4
"""A completion without a limit of its own needs this part of the sequence."""


class MisalignedCompletion(GrpoError):
    """A completion's tokens and logprobs cannot be trained on. The message lists every problem."""


class FailureReason(StrEnum):
    """Why a group was not added to the queue."""

    TOO_LONG = "too_long"
    EQUAL_SCORES = "equal_scores"
    QUARANTINED_REWARD = "quarantined_reward"
    FAILED_ROLLOUT = "failed_rollout"
    ABORTED = "aborted"
    REFUSED = "refused"
    TEACHER_REFUSED = "teacher_refused"
    UNAVAILABLE = "unavailable"
    TEACHER_UNAVAILABLE = "teacher_unavailable"
    UNDELIVERED = "undelivered"


FAILED = (FailureReason.QUARANTINED_REWARD, FailureReason.FAILED_ROLLOUT)
"""The code of the user or of an environment failed."""


class GroupLost(Exception):
    """Why a group is not submitted: ends its sampling, or is found when it is graded."""

    def __init__(self, reason: FailureReason, detail: str, completion_tokens: int = 0) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.completion_tokens = completion_tokens


@dataclass(frozen=True)
class SamplingPlan:
    """How to sample groups. Lengths are in tokens; a sequence must be below `max_token_length`.

    max_completion_tokens: of one completion; None for the task's own limit.
    reshaping: parameters that make tokens more or less likely than at `temperature`, by their names
        at the server.
    start_completion_tokens: the limit at the first training step, from which it grows linearly.
    step, steps: training steps that are done, and of the whole run. Without a run: as at its end.
    max_sequences: largest number of sequences of one rollout. A group has this number of sequences
        for each of its rollouts.
    mask_cut_off: give sequences that the token limit cut off an advantage of zero.
    asks_teacher: if there is one.
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
    step: int = 1
    steps: int = 1
    asks_teacher: bool = True

    def sampling(self, max_tokens: int, stop: Sequence[str]) -> dict[str, Any]:
        """The server's parameters for a completion."""
        ends = {"stop": [*stop]} if stop else {}
        return {**self.distribution, "max_tokens": max_tokens, **ends}

    @property
    def distribution(self) -> dict[str, float]:
        """The server's parameters that decide how likely each token is."""
        return {"temperature": self.temperature, **self.reshaping}

    def completion_limit(self, task: Task, room: int) -> int:
        """Tokens that a completion of the task may have now, with `room` tokens left."""
        most = min(self.max_completion_tokens or task.max_completion_tokens or room, room)
        start = self.start_completion_tokens
        if start is None or start >= most:
            return most
        return round(start + (most - start) * min(self.step / self.steps, 1.0))

    def longest_prompt(self, task: Task) -> int:
        """Tokens of a prompt that leave room for a whole completion."""
        most = self.max_completion_tokens or task.max_completion_tokens
        return self.max_token_length - (most or self.max_token_length // _LEAST_ROOM) - 1


@dataclass(frozen=True)
class AnswerEnd:
    """Numbers of messages, of messages as they were given, and of tokens up to an answer's end."""

    messages: int
    as_given: int
    tokens: int


@dataclass
class TrainingSequence:
    """One sequence that grows with a conversation. The lists have one entry per token [T].

    prompt 5 6, completion 90 91 sampled with -0.4, -1.2
        tokens       [ 5,    6,    90,   91 ]
        masks        [-100, -100,  90,   91 ]
        logprobs     [ 1.0,  1.0, -0.4, -1.2]
        sampled_ids  [ 90, 91 ]
        messages     [{"role": "user", "content": "3+4="}, {"role": "assistant", "content": "7"}]

    `grpo_core.wire.scored_group` explains the fields.

    as_given: the messages as the task passed the beginning of an answer.
    prompt, prompt_tokens: what the chat template got first, and the tokens that it made of it.
    tools: those that the prompt shows.
    answers: where each answer of the policy ends, so that other messages can follow it.
    is_answered: False while the policy answers: a call that continues it begins another sequence.
    teacher_logprobs: [T] None where nothing was sampled; empty without a teacher.
    receipts: of each completion; None where the server gave none.
    """

    tokens: list[int] = field(default_factory=list)
    masks: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampled_ids: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    first_version: PolicyVersion | None = None
    last_version: PolicyVersion | None = None
    finish_reason: str = STOPPED
    as_given: list[Message] = field(default_factory=list)
    is_chat: bool = True
    prompt: str | Sequence[Message] = ()
    prompt_tokens: int = 0
    tools: Sequence[Mapping[str, Any]] = ()
    answers: list[AnswerEnd] = field(default_factory=list)
    is_answered: bool = True
    teacher_logprobs: list[float | None] = field(default_factory=list)
    receipts: list[Mapping[str, Any] | None] = field(default_factory=list)

    def known_part(self, messages: Sequence[Message]) -> tuple[AnswerEnd, int] | None:
        """The last answer of this sequence that the messages contain, with all before it, and the
        number of messages up to there. A message that the policy continued may be there with its
        answer, or before it."""
        same, given = (_equal_first(messages, known) for known in (self.messages, self.as_given))
        for end in reversed(self.answers):
            if end.messages <= same:
                return end, end.messages
            if end.as_given <= given:
                return end, end.as_given
        return None

    def branch(self, end: AnswerEnd) -> TrainingSequence:
        """A sequence that goes on in another way from one of the answers. Up to there it has the
        same tokens, which are not trained twice."""
        return TrainingSequence(
            messages=self.messages[: end.messages],
            as_given=self.as_given[: end.as_given],
            prompt=self.prompt,
            prompt_tokens=self.prompt_tokens,
            tools=self.tools,
            answers=self.answers[: self.answers.index(end) + 1],
        ).add_prompt(self.tokens[: end.tokens])

    def add_prompt(self, token_ids: Sequence[int]) -> Self:
        """Add tokens that the policy did not sample."""
        self.tokens += token_ids
        self.masks += [MASKED] * len(token_ids)
        self.logprobs += [PROMPT_LOGPROB] * len(token_ids)
        return self

    def add_completion(self, completion: Completion) -> Self:
        """Add tokens that the policy sampled."""
        self.tokens += completion.token_ids
        self.masks += completion.token_ids
        self.logprobs += completion.logprobs
        self.sampled_ids += completion.token_ids
        self.first_version = self.first_version or completion.first_version
        self.last_version = completion.last_version
        self.finish_reason = completion.finish_reason
        self.receipts.append(completion.receipt)
        return self

    def receipt(self, score: float) -> dict[str, Any]:
        """The entry of `overrides` with which the trainer checks what arrives; none without a
        receipt of each completion."""
        if not self.receipts or None in self.receipts:
            return {}
        return {RECEIPT: {"score": score, "completions": self.receipts}}


def _equal_first(some: Sequence[Message], others: Sequence[Message]) -> int:
    """Number of messages at the beginning that are equal."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((n for n, (one, other) in pairs if one != other), min(len(some), len(others)))


class Generate(Protocol):
    """Samples completions, on one or several servers."""

    async def __call__(
        self, prompt_token_ids: list[int], home: Home | None = None, **sampling: Any
    ) -> GenerateAnswer: ...


async def complete(
    generate: Generate,
    prompt_ids: list[int],
    count: int,
    sampling: Mapping[str, Any],
    home: Home | None = None,
) -> list[Completion]:
    """Sample completions of one prompt, in one request.

    Args: home: of the conversation

    Raises:
        GroupLost: the server refused the request, or ended a completion before its end.
        ProtocolViolation: the answer has another prompt, or another number of completions.
        MisalignedCompletion: empty prompt or completion, or a logprob that is not a finite number
            of at most 0.
        ServiceUnavailable: no server answers.
    """
    try:
        answer = await generate(prompt_ids, home, n=count, **sampling)
    except RequestRefused as error:
        raise GroupLost(FailureReason.REFUSED, str(error)) from error
    completions = answer.completions()
    problems = []
    if len(completions) != count:
        problems.append(f"{len(completions)} completions instead of {count}")
    if answer.prompt_token_ids != prompt_ids:
        problems.append("prompt_token_ids that differ from the request")
    if problems:
        raise ProtocolViolation(
            "vllm-server: the response from /generate contains " + "; ".join(problems)
        )
    # The text of an aborted completion is not the policy's whole answer.
    aborted = sorted({completion.finish_reason for completion in completions} - {STOPPED, CUT_OFF})
    if aborted:
        raise GroupLost(
            FailureReason.ABORTED,
            f"the server ended a completion with finish reason {', '.join(aborted)}",
            sum(len(completion.token_ids) for completion in completions),
        )
    problems = [] if prompt_ids else ["the prompt has no tokens"]
    for index, completion in enumerate(completions):
        problems += [f"completion {index}: {problem}" for problem in _misaligned(completion)]
    if problems:
        raise MisalignedCompletion(
            "vllm-server: /generate sent an answer that cannot be trained on: "
            + "; ".join(problems)
        )
    return completions


def _misaligned(completion: Completion) -> Iterator[str]:
    if not completion.token_ids:
        yield "no tokens"
    for position, logprob in enumerate(completion.logprobs):
        if not (math.isfinite(logprob) and logprob <= LOGPROB_SLACK):
            yield f"invalid logprob {logprob} at token {position}"


@dataclass(frozen=True)
class SampledGroup:
    """What came of one prompt. The lists have one entry per rollout.

    two completions of "3+4=", graded and ready to submit
        answers    ["7", "8"]                                        each with its conversation
        sequences  [[TrainingSequence], [TrainingSequence]]          several if one was not enough
        grades     [Grade(1.0, {"accuracy": 1.0}), Grade(0.0, {"accuracy": 0.0})]
        group      the `ScoredGroup` to submit, but for two fields: see `scored_group`
        lost       None

    If `lost` is set, the group is not submitted: the lists then are as far as it was sampled and
    graded, and `group` is what would have been submitted if every answer has a grade.
    """

    answers: Sequence[Answer] = ()
    sequences: Sequence[Sequence[TrainingSequence]] = ()
    grades: Sequence[Grade] = ()
    group: ScoredGroup | None = None
    lost: GroupLost | None = None

    @property
    def completion_lengths(self) -> list[int]:
        """Tokens that the policy sampled in each rollout."""
        return [sum(len(s.sampled_ids) for s in rollout) for rollout in self.sequences]

    @property
    def policy_versions(self) -> list[tuple[PolicyVersion, PolicyVersion]]:
        """Those that sampled the first and the last token of each sequence."""
        ends = ((s.first_version, s.last_version) for rollout in self.sequences for s in rollout)
        return [(first, last) for first, last in ends if first is not None and last is not None]

    @property
    def completion_tokens(self) -> int:
        """All tokens that were sampled, also those that were thrown away."""
        return sum(self.completion_lengths) or (self.lost.completion_tokens if self.lost else 0)


def scored_group(
    item: Item,
    answers: Sequence[Answer],
    sequences: Sequence[Sequence[TrainingSequence]],
    grades: Sequence[Grade],
    plan: SamplingPlan,
    seconds: float,
) -> ScoredGroup:
    """The group to submit, but for the environment's id and its rewards since the previous one.

    Every rollout has `plan.max_sequences` sequences, all with the rollout's score; those that it
    lacks are padding.

    Args:
        answers, sequences, grades: one entry per rollout
        seconds: that the sampling took
    """
    rows = [
        (sequence, grade.score, _override(index, sequence, grade, plan))
        for index, (rollout, grade) in enumerate(zip(sequences, grades, strict=True))
        for sequence in _padded(rollout, plan.max_sequences)
    ]
    facts = RolloutFacts(
        policy_version=[(s.first_version, s.last_version) for s, *_ in rows],
        generation_seconds=seconds,
    )
    params: dict[str, Any] = {**plan.distribution}
    if not item.task.is_conversation and not item.task.drives_itself:
        params["max_tokens"] = answers[0].max_tokens
    return ScoredGroup(
        tokens=[sequence.tokens for sequence, *_ in rows],
        masks=[sequence.masks for sequence, *_ in rows],
        inference_logprobs=[sequence.logprobs for sequence, *_ in rows],
        scores=[score for _, score, _ in rows],
        messages=[[*map(dict, sequence.messages)] for sequence, *_ in rows],
        overrides=[override for *_, override in rows],
        generation_params=params,
        group_overrides=facts.on_the_wire() | {"task": item.task.name, "item": item.key},
        **_teacher_fields([sequence for sequence, *_ in rows]),
    )


def _teacher_fields(sequences: Sequence[TrainingSequence]) -> dict[str, Any]:
    """The teacher's logprobs on the wire: of the sampled tokens alone."""
    if not any(sequence.teacher_logprobs for sequence in sequences):
        return {}
    known = [s.teacher_logprobs or [None] * len(s.tokens) for s in sequences]
    return {
        "distill_token_ids": [
            [[] if value is None else [token] for token, value in zip(s.tokens, row, strict=True)]
            for s, row in zip(sequences, known, strict=True)
        ],
        "distill_logprobs": [[[] if value is None else [value] for value in row] for row in known],
    }


def _padded(rollout: Sequence[TrainingSequence], count: int) -> list[TrainingSequence]:
    """The rollout's sequences, and short ones on which nothing is trained: run-api queues groups of
    one size, but rollouts may have different numbers of sequences."""
    first = rollout[0]
    padding = TrainingSequence(
        first_version=first.first_version, last_version=first.last_version, finish_reason=PADDING
    ).add_prompt(first.tokens[:_PADDING_TOKENS])
    return [*rollout, *[padding] * (count - len(rollout))]


def _override(
    rollout: int, sequence: TrainingSequence, grade: Grade, plan: SamplingPlan
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "reward_parts": dict(grade.parts),
        "finish_reason": sequence.finish_reason,
        ROLLOUT: rollout,
        **sequence.receipt(grade.score),
    }
    if grade.reason:
        found["grade_reason"] = grade.reason
    if plan.mask_cut_off and sequence.finish_reason != STOPPED:
        found["set_advantage_to_zero"] = True
    return found
