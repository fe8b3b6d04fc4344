"""Samples and grades one group: one prompt, several rollouts, one scored group.

A group that cannot be used becomes a `RolloutFailure`, which is counted. An invalid answer of the
server raises an error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, TypeVar

from grpo_core.clients.inference import Completion, GenerateAnswer
from grpo_core.errors import GrpoError, ProtocolViolation, RequestRefused
from grpo_env.rollout.chat_template import ChatTemplate, answered
from grpo_env.rollout.dialogue import Generation, RecordedDialogue
from grpo_env.rollout.grading import Grade, Grader, Ungraded
from grpo_env.rollout.groups import (
    CUT_OFF,
    STOPPED,
    FailureReason,
    GroupLost,
    Rollout,
    RolloutFailure,
    Sample,
    SamplingPlan,
    raise_if_aborted,
    scored_group,
    sequences_of,
)
from grpo_env.rollout.user_code import TaskCode
from grpo_env.tasks import Answer, ContextFull, Message, State, Task
from grpo_env.tasks.items import Item
from grpo_env.tasks.rewards import RewardInvalid
from grpo_env.tasks.tools import tool_schemas

T = TypeVar("T")


class RolloutEngine:
    """Samples and grades groups.

    Args:
        generation: the inference servers
        template: of the served model
        grader: calls the rewards of tasks
        code: calls the other code of tasks
    """

    def __init__(
        self, generation: Generation, template: ChatTemplate, grader: Grader, code: TaskCode
    ) -> None:
        self._generation = generation
        self._template = template
        self._grader = grader
        self._code = code
        self._schemas: dict[int, list[dict[str, Any]]] = {}

    def prompt_ids(self, item: Item) -> list[int]:
        """[T] tokens that the policy continues first."""
        return self._template.prompt_ids(item.prompt, self._tools_of(item.task))

    async def roll_out(self, item: Item, plan: SamplingPlan) -> Rollout | RolloutFailure:
        """Sample one group and grade it.

        Raises:
            ServiceUnavailable: the inference server does not answer, or this request failed.
            ProtocolViolation, MisalignedCompletion: the server's answer is not valid.
            UnknownRewardPart: an option names a part that the task's reward does not have.
        """
        started = time.monotonic()
        try:
            samples, grades = await self.sample(item, plan)
        except GroupLost as lost:
            return RolloutFailure(lost.reason, lost.detail, (), lost.completion_tokens)
        return _judged(item, samples, grades, plan, time.monotonic() - started)

    async def sample_plainly(self, prompt_ids: list[int], max_tokens: int) -> Completion:
        """One completion at temperature 1, for a check of the served weights.

        Raises:
            RequestRefused, ServiceUnavailable, ProtocolViolation: the server's answer.
        """
        answer = await self._generation.generate(
            prompt_ids, n=1, max_tokens=max_tokens, temperature=1.0
        )
        (completion,) = answer.completions()
        return completion

    async def sample(
        self, item: Item, plan: SamplingPlan
    ) -> tuple[list[Sample], list[Grade | Ungraded]]:
        """The rollouts of one group and their grades, usable or not.

        Raises:
            GroupLost: the group could not be sampled.
        """
        if item.task.drives_itself:
            return await self._self_driven(item, plan)
        if item.task.is_conversation:
            samples = await all_or_none(
                self._conversation(item, plan) for _ in range(plan.group_size)
            )
        else:
            samples = await self._completions(item, plan)
        answers = [sample.answer for sample in samples]
        return samples, await self._grader.grade_all(item.task, answers, item.row)

    async def _completions(self, item: Item, plan: SamplingPlan) -> list[Sample]:
        """All completions of one prompt, in one request."""
        prompt_ids = self.prompt_ids(item)
        limit = plan.completion_limit(item.task, _room(plan, len(prompt_ids)))
        sampling: dict[str, Any] = {**plan.sampling, "max_tokens": limit}
        if item.task.stop:
            sampling["stop"] = [*item.task.stop]
        try:
            answer = await self._generation.generate(prompt_ids, n=plan.group_size, **sampling)
        except RequestRefused as error:
            raise GroupLost(FailureReason.REFUSED, str(error)) from error
        completions = _checked(answer, prompt_ids, plan)
        raise_if_aborted(completions)
        sequences = sequences_of(prompt_ids, completions)
        return [
            _sample(item, completion, sequence, limit, self._template.opening(item.prompt))
            for completion, sequence in zip(completions, sequences, strict=True)
        ]

    async def _conversation(self, item: Item, plan: SamplingPlan) -> Sample:
        """Let the task answer the policy, until the task ends the conversation."""
        task, state = item.task, State(item.row, item.messages)
        tools = self._tools_of(task)
        _room(plan, len(self._template.prompt_ids(item.prompt, tools)))
        dialogue = RecordedDialogue(self._generation.session(), self._template, plan, task, state)
        messages: str | Sequence[Message] = item.prompt
        while True:
            try:
                answer = await dialogue.say(messages, tools, stop=task.stop)
            except ContextFull:
                # The conversation ends with what was said so far.
                answer.finished = False
                dialogue.sequences[-1].finish_reason = CUT_OFF
                break
            if not answer.finished or state.turn >= task.max_turns:
                break
            more = await self._step(task, state, answer)
            if more is None:
                break
            messages = [*state.messages, *more]
        return _recorded(dialogue, answer)

    async def _step(self, task: Task, state: State, answer: Answer) -> Sequence[Message] | None:
        try:
            more = await self._code.step(task, state, answer)
        except GrpoError:
            raise
        except Exception as error:
            failed = self._grader.failed(task, error)
            raise GroupLost(FailureReason.QUARANTINED_REWARD, failed.problem) from error
        return more

    async def _self_driven(
        self, item: Item, plan: SamplingPlan
    ) -> tuple[list[Sample], list[Grade | Ungraded]]:
        """Let the task conduct and rate the rollouts."""
        task = item.task
        dialogues = [
            RecordedDialogue(
                self._generation.session(),
                self._template,
                plan,
                task,
                State(item.row, item.messages),
            )
            for _ in range(plan.group_size)
        ]
        values = await self._driven(item, dialogues)
        if not all(dialogue.sequences for dialogue in dialogues):
            raise GroupLost(FailureReason.QUARANTINED_REWARD, "the policy was asked for no answer")
        samples = [_recorded(dialogue, dialogue.last_answer) for dialogue in dialogues]
        return samples, [
            self._checked(task, value, sample.answer)
            for value, sample in zip(values, samples, strict=True)
        ]

    async def _driven(self, item: Item, dialogues: Sequence[RecordedDialogue]) -> list[Any]:
        task, row = item.task, item.row
        try:
            if not task.rates_groups:
                return await all_or_none(task.run(row, dialogue) for dialogue in dialogues)
            values = [*await task.run_group(row, dialogues)]
            if len(values) != len(dialogues):
                raise ValueError(f"{len(values)} rewards for {len(dialogues)} rollouts")
            return values
        except ContextFull as error:
            raise GroupLost(FailureReason.TOO_LONG, str(error)) from error
        except (GrpoError, GroupLost):
            raise
        except Exception as error:
            failed = self._grader.failed(task, error)
            raise GroupLost(FailureReason.QUARANTINED_REWARD, failed.problem) from error

    def _checked(self, task: Task, value: Any, answer: Answer) -> Grade | Ungraded:
        try:
            return self._grader.checked(task, value, answer)
        except RewardInvalid as error:
            return self._grader.failed(task, error)

    def _tools_of(self, task: Task) -> list[dict[str, Any]]:
        if id(task) not in self._schemas:
            self._schemas[id(task)] = tool_schemas(task.tools) if task.tools else []
        return self._schemas[id(task)]


async def all_or_none(rollouts: Iterable[Awaitable[T]]) -> list[T]:
    """As `asyncio.gather`, but if one fails the others are cancelled."""
    tasks = [asyncio.ensure_future(rollout) for rollout in rollouts]
    try:
        return [*await asyncio.gather(*tasks)]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _room(plan: SamplingPlan, prompt_tokens: int) -> int:
    """Tokens that are left for a completion. Raises `GroupLost` if there are none."""
    room = plan.max_token_length - 1 - prompt_tokens
    if room < 1:
        raise GroupLost(
            FailureReason.REFUSED,
            f"the prompt has {prompt_tokens} tokens, and the limit for a whole sequence is "
            f"{plan.max_token_length}; raise --seq-len of the environment and of the trainer",
        )
    return room


def _checked(answer: GenerateAnswer, prompt_ids: list[int], plan: SamplingPlan) -> list[Completion]:
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


def _sample(item: Item, completion: Completion, sequence: Any, limit: int, opening: str) -> Sample:
    messages = answered(item.messages, completion.text)
    answer = Answer(
        completion.text,
        finished=completion.finish_reason == STOPPED,
        messages=messages,
        state=State(item.row, messages),
        token_ids=completion.token_ids,
        max_tokens=limit,
        opening=opening,
    )
    return Sample((sequence,), (messages,), answer)


def _recorded(dialogue: RecordedDialogue, answer: Answer) -> Sample:
    return Sample(tuple(dialogue.sequences), tuple(dialogue.messages), answer)


def _judged(
    item: Item,
    samples: Sequence[Sample],
    grades: Sequence[Grade | Ungraded],
    plan: SamplingPlan,
    seconds: float,
) -> Rollout | RolloutFailure:
    graded = tuple(grade for grade in grades if isinstance(grade, Grade))
    tokens = sum(sample.completion_tokens for sample in samples)
    problems = [
        f"completion {index}: {grade.problem}"
        for index, grade in enumerate(grades)
        if isinstance(grade, Ungraded)
    ]
    if problems:
        reason, detail = FailureReason.QUARANTINED_REWARD, "; ".join(problems)
        return RolloutFailure(reason, detail, graded, tokens, tuple(samples))
    most = max(len(sample.sequences) for sample in samples)
    if most > plan.max_sequences:
        raise TooManySequences(
            f"a rollout of the task {item.task.name} has {most} sequences, and the limit is "
            f"{plan.max_sequences}; set max_sequences of the task to the largest number"
        )
    group = scored_group(item, samples, graded, plan, seconds)
    if failure := _reason_to_drop(samples, graded, plan):
        return RolloutFailure(*failure, graded, tokens, tuple(samples), group)
    return Rollout(group, tuple(samples), graded)


class TooManySequences(GrpoError):
    """A rollout has more sequences than its task declares."""


def _reason_to_drop(
    samples: Sequence[Sample], grades: Sequence[Grade], plan: SamplingPlan
) -> tuple[FailureReason, str] | None:
    longest = max(sample.longest for sample in samples)
    if longest >= plan.max_token_length:
        return (
            FailureReason.TOO_LONG,
            f"a sequence has {longest} tokens; the limit is {plan.max_token_length}",
        )
    if plan.drop_equal_scores and len({grade.score for grade in grades}) == 1:
        return FailureReason.EQUAL_SCORES, f"all {grades[0].score}"
    return None
