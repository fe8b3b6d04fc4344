"""The task `gsm8k`: word problems whose result is one number (Cobbe et al., arXiv 2110.14168)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from grpo_env.grading.final_answer import find_result
from grpo_env.grading.parts import accuracy, marked_number_format
from grpo_env.tasks import Answer, Item, KeptItems, Message
from grpo_env.tasks.gsm8k_data import Problem

INSTRUCTION = "Reason step by step. End with the line\n#### <number>"
"""Short, because with one token per character a problem alone has up to a thousand tokens."""

RIGHT = 1.0
"""Reward for the right number. It exceeds any reward for form, so a wrong answer never wins."""


T = TypeVar("T")
IsEqual = Callable[[str, str], bool]


@dataclass(frozen=True)
class AskedProblem:
    """One problem as a prompt.

    Args:
        is_equal: compares the answer's result with the right one
        format_reward: the largest reward for form, in [0, 1)
    """

    problem: Problem
    is_equal: IsEqual
    format_reward: float

    @property
    def messages(self) -> list[Message]:
        return [
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": self.problem.question},
        ]

    def grade(self, answer: Answer) -> float:
        """1.0 if the stated result equals the gold answer, plus the reward for form.

        Each of the three steps of `Form` earns a third of `format_reward`. So even a model that
        solves no problem gets groups with different scores. Length earns nothing.

        Raises:
            NotGraded: the result could not be compared in time.
        """
        result = find_result(answer.text, finished=answer.finished)
        right = accuracy(result, self.problem.gold, self.is_equal)
        form = marked_number_format(answer.text, finished=answer.finished)
        return RIGHT * right + self.format_reward * form


class Shuffled(Generic[T]):
    """An endless stream that goes through all items in a new order each time.

    The same items and the same seed give the same stream.
    """

    def __init__(self, items: Sequence[T], seed: int) -> None:
        self._items = list(items)
        self._random = random.Random(seed)
        self._left: list[T] = []

    def next(self) -> T:
        """Raises `IndexError` if there are no items."""
        if not self._left:
            self._left = self._random.sample(self._items, len(self._items))
        return self._left.pop()

    def keep(self, fits: Callable[[T], bool]) -> KeptItems:
        """Remove items that do not fit, also from the current pass."""
        before = len(self._items)
        self._items = [item for item in self._items if fits(item)]
        kept = {id(item) for item in self._items}
        self._left = [item for item in self._left if id(item) in kept]
        return KeptItems(kept=len(self._items), skipped=before - len(self._items))


class Gsm8k:
    """All problems, in a new order for every pass through the data set."""

    name = "gsm8k"
    max_completion_tokens = 512

    def __init__(
        self, problems: Sequence[Problem], seed: int, is_equal: IsEqual, format_reward: float
    ) -> None:
        asked = [AskedProblem(problem, is_equal, format_reward) for problem in problems]
        self._stream = Shuffled(asked, seed)

    def next_item(self) -> AskedProblem:
        return self._stream.next()

    def keep(self, fits: Callable[[Item], bool]) -> KeptItems:
        return self._stream.keep(fits)
