"""The task `arithmetic`: one-digit sums, which a model of 1M parameters learns in minutes."""

from __future__ import annotations

import random
from dataclasses import dataclass

from grpo_env.tasks import Answer, Message

_LARGEST_DIGIT = 9


@dataclass(frozen=True)
class Sum:
    """The prompt `a+b=`, for example "3+4="."""

    a: int
    b: int

    @property
    def messages(self) -> list[Message]:
        return [{"role": "user", "content": f"{self.a}+{self.b}="}]

    def grade(self, answer: Answer) -> float:
        """1.0 if the answer is the right number, apart from white space; otherwise 0.0."""
        return 1.0 if answer.text.strip() == str(self.a + self.b) else 0.0


class Arithmetic:
    """Independent random sums. The same seed gives the same sums."""

    name = "arithmetic"
    max_completion_tokens = 16

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def next_item(self) -> Sum:
        return Sum(self._random.randint(0, _LARGEST_DIGIT), self._random.randint(0, _LARGEST_DIGIT))
