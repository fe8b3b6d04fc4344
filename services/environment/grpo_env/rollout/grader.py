"""Grades answers: calls the task's reward, checks what it returns and adds the parts up."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from grpo_core.errors import GrpoError
from grpo_core.wire.fields import FLOAT32_MAX
from grpo_env.maths.parts import SHAPING, raise_if_unknown, weighted
from grpo_env.rollout.task_code import TaskCode, UserCodeFailed
from grpo_env.tasks import Answer, Row, Task
from grpo_env.tasks.reward_functions import RewardInvalid, graded_of

log = structlog.get_logger()

_ANSWERS_TO_KNOW_ALL_PARTS = 64
"""A reward may leave a part out of some answers."""


@dataclass(frozen=True)
class Grade:
    """`score`: the weighted sum of `parts`."""

    score: float
    parts: Mapping[str, float]
    reason: str = ""


@dataclass(frozen=True)
class Ungraded:
    """Why an answer could not be graded."""

    problem: str


class Grader:
    """Grades the answers of a group side by side.

    Args:
        weights: of the parts; they replace the task's own
        code: calls the task
    """

    def __init__(self, weights: Mapping[str, float], code: TaskCode) -> None:
        self._weights = weights
        self._code = code
        self._seen: set[str] = set()  # kinds of failures that were logged
        self._parts: set[str] = set()
        self._answers = 0

    async def grade_all(
        self, task: Task, answers: Sequence[Answer], row: Row
    ) -> list[Grade | Ungraded]:
        """One entry for each answer, in order. An answer that cannot be graded never gets a score.

        Raises:
            UnknownRewardPart: a weight names a part that no reward has returned so far.
        """
        graded = (self._grade(task, answer, row) for answer in answers)
        if task.blocks or inspect.iscoroutinefunction(task.reward):
            found = [*await asyncio.gather(*graded)]
        else:  # nothing to wait for, so tasks of asyncio would only cost time
            found = [await grade for grade in graded]
        self._answers += len(found)
        if self._answers >= _ANSWERS_TO_KNOW_ALL_PARTS:
            self.check_weights()
        return found

    def check_weights(self) -> None:
        """Raises `UnknownRewardPart` if a weight of the user names no part seen so far."""
        if self._parts:
            raise_if_unknown(self._weights, self._parts)

    async def _grade(self, task: Task, answer: Answer, row: Row) -> Grade | Ungraded:
        try:
            return self.checked(task, await self._code.reward(task, answer, row), answer)
        except GrpoError:
            raise
        except Exception as error:  # noqa: BLE001 - code of a user
            return self.failed(task, error)

    def failed(self, task: Task, error: Exception) -> Ungraded:
        """Report an error of the task's code, once for each kind."""
        failure = UserCodeFailed.of(error)
        if (kind := f"{failure.kind} {failure.place}") not in self._seen:
            self._seen.add(kind)
            log.warning(
                "reward.failed",
                task=task.name,
                error=f"{failure.kind}: {failure}",
                hint="this kind of failure is only counted from now on",
                traceback=failure.trace,
            )
        return Ungraded(f"{failure.kind}: {failure}")

    def checked(self, task: Task, value: Any, answer: Answer) -> Grade:
        """The grade of what a reward returned.

        Raises:
            RewardInvalid: it is no number, no named numbers, or beyond float32.
        """
        graded = graded_of(value)
        weights = {**task.weights, **self._weights}
        self._parts |= graded.parts.keys()
        parts = {name: part for name, part in graded.parts.items() if part is not None}
        for name in weights.keys() & SHAPING.keys() - parts.keys():
            parts[name] = SHAPING[name](answer)
        self._parts |= parts.keys()
        if graded.score is not None:
            # The task's own score already contains its parts; weights of the user add to it.
            weights = {**dict.fromkeys(parts, 0.0), **weights}
        score = (graded.score or 0.0) + weighted(parts, weights)
        if abs(score) > FLOAT32_MAX:
            raise RewardInvalid(
                f"the score is {score:g}, which float32 cannot hold; lower the weights"
            )
        return Grade(score, parts, graded.reason)
