"""Grades answers: calls the task's reward, checks what it returns and adds the parts up.

Every task can use the penalties `length`, `repetition` and `overlong`. Their values are in [-1, 0],
so that a positive weight is the strength of the penalty.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from grpo_core.errors import GrpoError
from grpo_core.wire.fields import FLOAT32_MAX
from grpo_env.rollout.task_code import TaskCode, UserCodeFailed
from grpo_env.tasks import Answer, Graded, Task
from grpo_env.tasks.items import Item
from grpo_env.tasks.reward_functions import RewardInvalid, graded_of

log = structlog.get_logger()

_ANSWERS_TO_KNOW_ALL_PARTS = 64
"""A reward may leave a part out of some answers."""
_BUFFER_SHARE = 0.2
"""Share of the token limit in which `overlong` grows. DAPO: 4,096 of 20,480 tokens."""
_NGRAM_WORDS = 4


class UnknownRewardPart(GrpoError):
    """A weight names a reward part that does not exist. The message lists the parts that do."""


def length(answer: Answer) -> float:
    """Minus the share of the token limit that the answer used."""
    return -min(1.0, len(answer.token_ids) / answer.max_tokens)


def repetition(answer: Answer) -> float:
    """Minus the share of n-grams of words that occurred before in the same answer.

    Words are separated by white space; case does not matter. The formula is Open-R1's, after
    appendix C.2 of Yeo et al., "Demystifying Long Chain-of-Thought Reasoning" (arXiv 2502.03373).
    """
    words = answer.lower().split()
    ngrams = list(zip(*(words[start:] for start in range(_NGRAM_WORDS)), strict=False))
    return len(set(ngrams)) / len(ngrams) - 1.0 if ngrams else 0.0


def overlong(answer: Answer) -> float:
    """Falls from 0 to -1 in a buffer at the end of the token limit.

    "Soft overlong punishment", equation 13 of DAPO (arXiv 2503.14476): with a limit of L tokens and
    a buffer of B, an answer of n tokens gets (L - B - n) / B, at most 0 and at least -1. An answer
    that the limit cut off gets -1.
    """
    if not answer.finished:
        return -1.0
    limit = answer.max_tokens
    buffer = _BUFFER_SHARE * limit
    return max(-1.0, min(0.0, (limit - buffer - len(answer.token_ids)) / buffer))


PENALTIES: Mapping[str, Callable[[Answer], float]] = {
    "length": length,
    "repetition": repetition,
    "overlong": overlong,
}


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
        self.code = code
        self._seen: set[str] = set()  # kinds of failures that were logged
        self._parts: set[str] = set()
        self._answers = 0

    async def grade_all(self, item: Item, answers: Sequence[Answer]) -> list[Grade | Ungraded]:
        """One entry for each answer, in order. An answer that cannot be graded never gets a score.
        Raises `UnknownRewardPart`: a weight names a part that no reward has returned so far."""
        graded, task = (self._call(item, answer) for answer in answers), item.task
        if task.blocks or task.has_async_reward:
            found = [*await asyncio.gather(*graded)]
        else:  # nothing to wait for, so tasks of asyncio would only cost time
            found = [await grade for grade in graded]
        self._answers += len(found)
        if self._answers >= _ANSWERS_TO_KNOW_ALL_PARTS:
            self.check_weights()
        return found

    def check_weights(self) -> None:
        """Raises `UnknownRewardPart` if a weight of the user names no part seen so far."""
        unknown = sorted(self._weights.keys() - self._parts)
        if unknown and self._parts:
            raise UnknownRewardPart(
                f"weights of unknown reward parts: {', '.join(unknown)}; there are "
                f"{', '.join(sorted(self._parts))}"
            )

    async def _call(self, item: Item, answer: Answer) -> Grade | Ungraded:
        try:
            value = await self.code.reward(item.task, answer, item.row)
        except GrpoError:
            raise
        except Exception as error:  # noqa: BLE001 - code of a user
            return self.failed(item, error)
        return self.grade(item, value, answer)

    def failed(self, item: Item, error: Exception) -> Ungraded:
        """Report an error of the task's code, once for each kind."""
        failure = UserCodeFailed.of(error)
        if (kind := f"{failure.kind} {failure.place}") not in self._seen:
            self._seen.add(kind)
            log.warning(
                "reward.failed",
                **({"at": failure.place} if failure.place else {}),
                error=f"{failure.kind}: {failure}",
                row=item.place,
                task=item.task.name,
                exception=failure.trace or None,
            )
        return Ungraded(f"{failure.kind}: {failure}")

    def grade(self, item: Item, value: Any, answer: Answer) -> Grade | Ungraded:
        """The grade of what a reward returned, if that is a number, or named numbers."""
        try:
            return self._weighted(item.task, graded_of(value), answer)
        except Exception as error:  # noqa: BLE001 - code of a user, for example `__float__`
            return self.failed(item, error)

    def _weighted(self, task: Task, graded: Graded, answer: Answer) -> Grade:
        weights = {**task.weights, **self._weights}
        self._parts |= graded.parts.keys()
        parts = {name: part for name, part in graded.parts.items() if part is not None}
        for name in weights.keys() & PENALTIES.keys() - parts.keys():
            parts[name] = PENALTIES[name](answer)
        self._parts |= parts.keys()
        if graded.score is not None:
            # The task's own score already contains its parts; weights of the user add to it.
            weights = {**dict.fromkeys(parts, 0.0), **weights}
        score = graded.score or 0.0
        score += sum(weights.get(name, 1.0) * value for name, value in parts.items())
        if abs(score) > FLOAT32_MAX:
            raise RewardInvalid(
                f"the score is {score:g}, which float32 cannot hold; lower the weights"
            )
        return Grade(score, {**graded.metrics, **parts}, graded.reason)
