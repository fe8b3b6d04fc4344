"""Samples and grades one group: one prompt, several rollouts, one scored group.

A group that cannot be used is lost, which is counted. An invalid answer of the server raises an
error.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from grpo_core.clients.inference import Completion
from grpo_core.errors import GrpoError
from grpo_env.rollout.chat_template import ChatTemplate
from grpo_env.rollout.dialogue import RecordedDialogue
from grpo_env.rollout.grader import Grade, Grader, Ungraded
from grpo_env.rollout.groups import (
    FailureReason,
    Generate,
    GroupLost,
    SampledGroup,
    SamplingPlan,
    TrainingSequence,
    complete,
    scored_group,
)
from grpo_env.rollout.teacher import Teacher
from grpo_env.tasks import ContextFull, Message, RolloutFailed, Task
from grpo_env.tasks.items import Item
from grpo_env.tasks.tools import tool_schemas

T = TypeVar("T")


@dataclass(eq=False)
class RolloutEngine:
    """Samples and grades groups.

    Args:
        generate: of the inference servers
        template: of the served model
        grader: calls the code of tasks
        teacher: scores the tokens of groups that are kept; None without one
    """

    generate: Generate
    template: ChatTemplate
    grader: Grader
    teacher: Teacher | None = None
    _schemas: dict[int, list[dict[str, Any]]] = field(default_factory=dict, init=False)

    def prompt_ids(self, item: Item) -> list[int]:
        """[T] tokens that the policy continues first."""
        return self.template.prompt_ids(item.prompt, self._tools_of(item.task))

    async def roll_out(self, item: Item, plan: SamplingPlan) -> SampledGroup:
        """Sample one group and grade it.

        Raises:
            ServiceUnavailable: the inference server does not answer, or this request failed.
            TeacherUnavailable: so with the teacher.
            ProtocolViolation, MisalignedCompletion: the answer of one of them is not valid.
            UnknownRewardPart: an option names a part that the task's reward does not have.
        """
        started = time.monotonic()
        dialogues = self._begun(item, plan)
        try:
            grades = await self._graded(item, plan, dialogues)
        except GroupLost as lost:
            return SampledGroup(sequences=[one.sequences for one in dialogues], lost=lost)
        answers = [dialogue.last_answer for dialogue in dialogues]
        sequences = [dialogue.sequences for dialogue in dialogues]
        graded = [grade for grade in grades if isinstance(grade, Grade)]
        if problems := [
            f"completion {index}: {grade.problem}"
            for index, grade in enumerate(grades)
            if isinstance(grade, Ungraded)
        ]:
            detail = f"{item.place}: {'; '.join(problems)}"
            ungraded = GroupLost(FailureReason.QUARANTINED_REWARD, detail)
            return SampledGroup(answers, sequences, graded, lost=ungraded)
        if (most := max(map(len, sequences))) > plan.max_sequences:
            detail = (
                f"a rollout of the task {item.task.name} has {most} sequences, and the limit is "
                f"{plan.max_sequences}; set {item.task.max_sequences_option} to the largest number"
            )
            crowded = GroupLost(FailureReason.FAILED_ROLLOUT, detail)
            return SampledGroup(answers, sequences, graded, lost=crowded)
        seconds = time.monotonic() - started
        dropped = _reason_to_drop(sequences, graded, plan)
        if self.teacher is not None and plan.asks_teacher and dropped is None:
            try:
                await self.teacher.score([one for rollout in sequences for one in rollout])
            except GroupLost as lost:
                dropped = lost
        group = scored_group(item, answers, sequences, graded, plan, seconds)
        return SampledGroup(answers, sequences, graded, group, dropped)

    async def sample_plainly(self, prompt_ids: list[int], max_tokens: int) -> Completion:
        """One completion at temperature 1, for a check of the served weights. Raises
        `RequestRefused`, `ServiceUnavailable`, `ProtocolViolation`: the server's answer."""
        answer = await self.generate(prompt_ids, n=1, max_tokens=max_tokens, temperature=1.0)
        (completion,) = answer.completions()
        return completion

    async def sample(
        self, item: Item, plan: SamplingPlan
    ) -> tuple[list[RecordedDialogue], list[Grade | Ungraded]]:
        """The rollouts of one group and the grades of their last answers, usable or not. Raises
        `GroupLost`: the group could not be sampled."""
        dialogues = self._begun(item, plan)
        return dialogues, await self._graded(item, plan, dialogues)

    def _begun(self, item: Item, plan: SamplingPlan) -> list[RecordedDialogue]:
        return [
            RecordedDialogue(self.generate, self.template, plan, item)
            for _ in range(plan.group_size)
        ]

    async def _graded(
        self, item: Item, plan: SamplingPlan, dialogues: list[RecordedDialogue]
    ) -> list[Grade | Ungraded]:
        """Conduct the dialogues, and grade their last answers."""
        if item.task.drives_itself:
            return await self._self_driven(item, dialogues)
        if item.task.is_conversation:
            await all_or_none(self._conversation(item, plan, one) for one in dialogues)
        else:
            await self._completions(item, plan, dialogues)
        return await self.grader.grade_all(item, [one.last_answer for one in dialogues])

    async def _completions(
        self, item: Item, plan: SamplingPlan, dialogues: list[RecordedDialogue]
    ) -> None:
        """All completions of one prompt, in one request."""
        prompt_ids = self.prompt_ids(item)
        limit = plan.completion_limit(item.task, _room(plan, prompt_ids))
        sampling = plan.sampling(limit, item.task.stop)
        completions = await complete(self.generate, prompt_ids, plan.group_size, sampling)
        for dialogue, completion in zip(dialogues, completions, strict=True):
            dialogue.begin_with(item.prompt, prompt_ids, completion, limit)

    async def _conversation(
        self, item: Item, plan: SamplingPlan, dialogue: RecordedDialogue
    ) -> None:
        """Let the task answer the policy, until the task ends the conversation."""
        task = item.task
        _room(plan, self.prompt_ids(item))
        messages: str | Sequence[Message] = item.prompt
        while True:
            try:
                answer = await dialogue.say(messages, self._tools_of(task), stop=task.stop)
            except ContextFull:
                dialogue.cut_off()  # the conversation ends with what was said so far
                return
            if not answer.finished or answer.state.turn >= task.max_turns:
                return
            with self._quarantine(item):
                more = await self.grader.code.step(task, answer.state, answer)
            if more is None:
                return
            messages = [*answer.state.messages, *more]

    async def _self_driven(
        self, item: Item, dialogues: list[RecordedDialogue]
    ) -> list[Grade | Ungraded]:
        """Let the task conduct the rollouts, and rate them unless its reward does."""
        task, row = item.task, item.row
        values: list[Any]
        with self._quarantine(item):
            if task.rates_groups:
                values = [*await task.run_group(row, dialogues)]
                if len(values) != len(dialogues):
                    raise ValueError(f"{len(values)} rewards for {len(dialogues)} rollouts")
            else:
                values = await all_or_none(task.run(row, dialogue) for dialogue in dialogues)
        if not all(dialogue.sequences for dialogue in dialogues):
            raise GroupLost(FailureReason.FAILED_ROLLOUT, "the policy was asked for no answer")
        answers = [dialogue.last_answer for dialogue in dialogues]
        if None in values:
            return await self.grader.grade_all(item, answers)
        return [
            self.grader.grade(item, value, answer)
            for value, answer in zip(values, answers, strict=True)
        ]

    def _tools_of(self, task: Task) -> list[dict[str, Any]]:
        if id(task) not in self._schemas:
            self._schemas[id(task)] = tool_schemas(task.tools) if task.tools else []
        return self._schemas[id(task)]

    @contextlib.contextmanager
    def _quarantine(self, item: Item) -> Iterator[None]:
        """Raises `GroupLost` for an error of the task's code; a `GrpoError` passes."""
        try:
            yield
        except ContextFull as error:
            raise GroupLost(FailureReason.TOO_LONG, str(error)) from error
        except (GrpoError, GroupLost):
            raise
        except RolloutFailed as error:
            raise GroupLost(FailureReason.FAILED_ROLLOUT, str(error)) from error
        except Exception as error:
            problem = f"{item.place}: {self.grader.failed(item, error).problem}"
            raise GroupLost(FailureReason.FAILED_ROLLOUT, problem) from error


async def all_or_none(rollouts: Iterable[Awaitable[T]]) -> list[T]:
    """The value of each rollout. If one fails, cancels the others."""
    tasks = [asyncio.ensure_future(rollout) for rollout in rollouts]
    try:
        return [*await asyncio.gather(*tasks)]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _room(plan: SamplingPlan, prompt_ids: Sequence[int]) -> int:
    """Tokens that are left for a completion. Raises `GroupLost` if there are none."""
    room = plan.max_token_length - 1 - len(prompt_ids)
    if room < 1:
        raise GroupLost(
            FailureReason.REFUSED,
            f"the prompt has {len(prompt_ids)} tokens, and the limit for a whole sequence is "
            f"{plan.max_token_length}; raise --seq-len of the environment and of the trainer",
        )
    return room


def _reason_to_drop(
    sequences: Sequence[Sequence[TrainingSequence]], grades: Sequence[Grade], plan: SamplingPlan
) -> GroupLost | None:
    longest = max(len(sequence.tokens) for rollout in sequences for sequence in rollout)
    if longest >= plan.max_token_length:
        detail = f"a sequence has {longest} tokens; the limit is {plan.max_token_length}"
        return GroupLost(FailureReason.TOO_LONG, detail)
    if plan.drop_equal_scores and len({grade.score for grade in grades}) == 1:
        return GroupLost(FailureReason.EQUAL_SCORES, f"all {grades[0].score}")
    return None
