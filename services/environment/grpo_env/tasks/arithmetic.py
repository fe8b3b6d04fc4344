"""The task `arithmetic`: sums and other exact calculations of growing length."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import product

from grpo_env.tasks.rows import Row, Split, TaskOptions
from grpo_env.tasks.task import Answer, Graded, Task
from grpo_env.tasks.tool_calls import Message

_MOST_ROWS = 10_000

_OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}
LEVELS: Mapping[int, tuple[int, str]] = {1: (1, "+"), 2: (2, "+"), 3: (2, "+-"), 4: (3, "+-*")}
"""Level → largest number of digits of an operand, operators."""


class Arithmetic(Task):
    """Calculations such as `3+4=`. Level 1 has all 100 one-digit sums, which a model of 1M
    parameters learns in minutes; the others have 10,000 calculations."""

    name = "arithmetic"
    max_completion_tokens = 16
    held_out = 0.2
    blocks = False

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        self.level = int(self.checked_arguments(level=1)["level"])
        if self.level not in LEVELS:
            raise ValueError(
                f"arithmetic: level is {self.level}; expected one of {', '.join(map(str, LEVELS))}"
            )

    def rows(self, split: Split) -> Sequence[Row] | None:
        if split == "test":
            return None
        digits, operators = LEVELS[self.level]
        numbers = range(10**digits)
        calculations = list(product(numbers, operators, numbers)) if digits == 1 else None
        if calculations is None:
            drawn = random.Random(0)  # not the seed: evaluation must know the training items
            calculations = [
                (drawn.choice(numbers), drawn.choice(operators), drawn.choice(numbers))
                for _ in range(_MOST_ROWS)
            ]
        return [
            {"question": f"{a}{sign}{b}=", "answer": str(_OPERATORS[sign](a, b))}
            for a, sign, b in calculations
        ]

    def prompt(self, row: Row) -> list[Message]:
        return [{"role": "user", "content": row["question"]}]

    def reward(self, answer: Answer, row: Row) -> Graded:
        """1.0 if the answer is the right number, apart from white space; otherwise 0.0."""
        said, right = answer.strip(), row["answer"]
        return Graded({"accuracy": float(said == right)}, f"expected {right}")
