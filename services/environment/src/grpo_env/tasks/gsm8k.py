"""Word problems of GSM8K: reason, then state one number (Cobbe et al. 2021, arXiv 2110.14168)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from grpo_env.tasks import Answer, Item, KeptItems, Message
from grpo_env.tasks.final_answer import Form, read_final_answer
from grpo_env.tasks.gsm8k_data import Problem

INSTRUCTION = "Reason step by step. End with the line\n#### <number>"
"""Short: with one token per character the problems themselves have up to a thousand tokens."""

RIGHT = 1.0
"""The right number. More than any share for form, so that no wrong answer ever beats it."""


T = TypeVar("T")
IsEqual = Callable[[str, str], bool]


@dataclass(frozen=True)
class AskedProblem:
    """One problem as a prompt.

    Args:
        is_equal: compares what was answered with what is right
        format_reward: the largest share for form, in [0, 1)
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
        """1.0 where the stated result equals the gold answer, plus the share for form.

        Each of the three steps of `Form` is worth a third of the share: a model that never
        solves a problem still finds groups whose scores differ. Length earns nothing.

        Raises:
            NotGraded: no verdict on the result in time.
        """
        final = read_final_answer(answer)
        right = final.result is not None and self.is_equal(final.result, self.problem.gold)
        return RIGHT * right + self.format_reward * final.form / Form.MARKED_NUMBER


class Shuffled(Generic[T]):
    """An endless stream of items: every epoch in a new order, none twice in an epoch.

    The same items and the same seed give the same stream.
    """

    def __init__(self, items: Sequence[T], seed: int) -> None:
        self._items = list(items)
        self._random = random.Random(seed)
        self._left: list[T] = []

    def next(self) -> T:
        """Raises `IndexError` where there is no item at all."""
        if not self._left:
            self._left = self._random.sample(self._items, len(self._items))
        return self._left.pop()

    def keep(self, fits: Callable[[T], bool]) -> KeptItems:
        """Drop what does not fit, from the epoch under way too."""
        before = len(self._items)
        self._items = [item for item in self._items if fits(item)]
        kept = {id(item) for item in self._items}
        self._left = [item for item in self._left if id(item) in kept]
        return KeptItems(kept=len(self._items), skipped=before - len(self._items))


class Gsm8k:
    """The problems, shuffled anew for every epoch."""

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
