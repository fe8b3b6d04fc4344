"""Sums of two-digit numbers, with two worked examples in the conversation."""

import random

from grpo_env.tasks import Task

EXAMPLES = [(34, 25), (18, 57)]


class TwoDigitSums(Task):
    max_completion_tokens = 16

    def rows(self, split):
        drawn = random.Random(split)
        pairs = [(drawn.randint(10, 49), drawn.randint(10, 49)) for _ in range(400)]
        rows = [{"a": a, "b": b} for a, b in pairs]
        return rows if split == "train" else rows[:32]

    def prompt(self, row):
        conversation = []
        for a, b in [*EXAMPLES, (row["a"], row["b"])]:
            conversation += [
                {"role": "user", "content": f"What is {a} + {b}?"},
                {"role": "assistant", "content": f"{a} + {b} = {a + b}"},
            ]
        return conversation[:-1]

    def reward(self, answer, row):
        """1 for the right sum; up to 0.5 for a sum that is nearly right."""
        question, _, result = answer.strip().partition(" = ")
        if question != f"{row['a']} + {row['b']}" or not result.isdecimal():
            return {"accuracy": 0.0, "near": 0.0}
        off = abs(int(result) - row["a"] - row["b"])
        return {"accuracy": float(off == 0), "near": 0.5 * max(0.0, 1 - off / 10)}
