"""Samples and grades one group: one prompt, one generation request, one scored group.

A group that cannot be used becomes a `RolloutFailure`, which is counted. An invalid answer of the
server raises an error.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from grpo_core.clients.inference import Completion, GenerateAnswer
from grpo_core.errors import ProtocolViolation, RequestRefused
from grpo_core.wire.scored_group import RolloutFacts, ScoredGroup
from grpo_env.rollout.training_sequences import align_group
from grpo_env.tasks import Answer, Item

_STOPPED = "stop"
_FINISHED = frozenset({_STOPPED, "length"})


class FailureReason(StrEnum):
    """Why a group was not added to the queue."""

    TOO_LONG = "too_long"
    EQUAL_SCORES = "equal_scores"
    QUARANTINED_REWARD = "quarantined_reward"
    ABORTED = "aborted"
    REFUSED = "refused"
    UNAVAILABLE = "unavailable"
    UNDELIVERED = "undelivered"


class Generation(Protocol):
    """Samples completions of one prompt on an inference server."""

    async def generate(self, prompt_token_ids: list[int], **sampling: Any) -> GenerateAnswer: ...


@dataclass(frozen=True)
class SamplingPlan:
    """How to sample groups. Lengths are in tokens; a sequence must be below `max_token_length`."""

    group_size: int
    temperature: float
    max_token_length: int
    max_completion_tokens: int
    drop_equal_scores: bool


@dataclass(frozen=True)
class Rollout:
    """A group that is ready to submit, except for the environment's id."""

    group: ScoredGroup
    rewards: tuple[float, ...]
    completion_tokens: int


@dataclass(frozen=True)
class RolloutFailure:
    """A group that is not submitted. `rewards`: its rewards, if it was graded."""

    reason: FailureReason
    detail: str
    rewards: tuple[float, ...] = ()
    completion_tokens: int = 0


async def roll_out(
    generation: Generation, item: Item, prompt_ids: list[int], plan: SamplingPlan
) -> Rollout | RolloutFailure:
    """Sample one group and grade it.

    Args:
        prompt_ids: [T], the item's messages as token ids.

    Raises:
        ServiceUnavailable: the inference server does not answer, or this request failed.
        ProtocolViolation, MisalignedCompletion: the server's answer is not valid.
    """
    room = plan.max_token_length - len(prompt_ids)
    if room < 1:
        return RolloutFailure(
            FailureReason.REFUSED,
            f"the prompt has {len(prompt_ids)} tokens, and the limit for a whole sequence is "
            f"{plan.max_token_length}; raise --seq-len of the environment and of the trainer",
        )
    params = {
        "temperature": plan.temperature,
        "max_tokens": min(plan.max_completion_tokens, room),
    }
    started = time.monotonic()
    try:
        answer = await generation.generate(prompt_ids, n=plan.group_size, **params)
    except RequestRefused as error:
        return RolloutFailure(FailureReason.REFUSED, str(error))
    seconds = time.monotonic() - started
    completions = _completions(answer, prompt_ids, plan)
    return await _judge(item, prompt_ids, completions, plan, params, seconds)


def _completions(
    answer: GenerateAnswer, prompt_ids: list[int], plan: SamplingPlan
) -> list[Completion]:
    completions = answer.completions()
    problems = []
    if len(completions) != plan.group_size:
        problems.append(f"{len(completions)} completions instead of {plan.group_size}")
    if answer.prompt_token_ids != prompt_ids:
        problems.append("prompt_token_ids that differ from the request")
    if problems:
        raise ProtocolViolation(
            "vllm-server: the response from /generate contains " + "; ".join(problems)
        )
    return completions


@dataclass(frozen=True)
class Grades:
    """`scores`: the scores of the graded answers, in order; `quarantined`: the reasons why other
    answers could not be graded.

    If `quarantined` is empty, scores[i] belongs to answer i.
    """

    scores: tuple[float, ...]
    quarantined: tuple[str, ...]


def grade_all(item: Item, answers: Sequence[Answer]) -> Grades:
    """Grade every answer. An answer that cannot be graded never gets a score of 0."""
    scores: list[float] = []
    quarantined: list[str] = []
    for index, answer in enumerate(answers):
        try:
            score = item.grade(answer)
        except ValueError as error:
            quarantined.append(f"completion {index}: {error}")
            continue
        if math.isfinite(score):
            scores.append(score)
        else:
            quarantined.append(f"completion {index}: score {score} is not a finite number")
    return Grades(tuple(scores), tuple(quarantined))


async def _judge(
    item: Item,
    prompt_ids: list[int],
    completions: list[Completion],
    plan: SamplingPlan,
    params: dict[str, Any],
    seconds: float,
) -> Rollout | RolloutFailure:
    token_count = sum(len(completion.token_ids) for completion in completions)
    reasons = sorted({completion.finish_reason for completion in completions} - _FINISHED)
    if reasons:
        # The server aborted the sampling, so the text is not the policy's whole answer.
        detail = f"the server ended a completion with finish reason {', '.join(reasons)}"
        return RolloutFailure(FailureReason.ABORTED, detail, completion_tokens=token_count)
    # In a thread, because slow grading would block the event loop and so all other groups.
    answers = [Answer(c.text, finished=c.finish_reason == _STOPPED) for c in completions]
    grades = await asyncio.to_thread(grade_all, item, answers)
    failure = _reason_to_drop(len(prompt_ids), completions, grades, plan)
    if failure is not None:
        return RolloutFailure(*failure, rewards=grades.scores, completion_tokens=token_count)
    group = _scored_group(item, prompt_ids, completions, grades.scores, params, seconds)
    return Rollout(group, grades.scores, token_count)


def _reason_to_drop(
    prompt_length: int, completions: Sequence[Completion], grades: Grades, plan: SamplingPlan
) -> tuple[FailureReason, str] | None:
    if grades.quarantined:
        return FailureReason.QUARANTINED_REWARD, "; ".join(grades.quarantined)
    longest = prompt_length + max(len(completion.token_ids) for completion in completions)
    if longest >= plan.max_token_length:
        return (
            FailureReason.TOO_LONG,
            f"a sequence has {longest} tokens; the limit is {plan.max_token_length}",
        )
    if plan.drop_equal_scores and len(set(grades.scores)) == 1:
        return FailureReason.EQUAL_SCORES, f"all {grades.scores[0]}"
    return None


def _scored_group(
    item: Item,
    prompt_ids: list[int],
    completions: list[Completion],
    scores: Sequence[float],
    params: dict[str, Any],
    seconds: float,
) -> ScoredGroup:
    facts = RolloutFacts(
        policy_version=[(c.first_version, c.last_version) for c in completions],
        generation_seconds=seconds,
    )
    return ScoredGroup(
        **align_group(prompt_ids, completions),
        scores=list(scores),
        messages=[
            [*map(dict, item.messages), {"role": "assistant", "content": completion.text}]
            for completion in completions
        ],
        generation_params=params,
        group_overrides=facts.on_the_wire(),
    )
