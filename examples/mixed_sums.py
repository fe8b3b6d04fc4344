"""Sums of numbers with one to four digits, and a rule that goes from the short to the long ones."""

import random

from grpo_env.tasks import Task

LENGTHS, EACH = (1, 2, 3, 4), 80


class MixedSums(Task):
    max_completion_tokens = 8
    blocks = False

    def rows(self, split):
        drawn = random.Random(split)
        return [
            {"a": drawn.randrange(10**n), "b": drawn.randrange(10**n), "digits": n}
            for n in LENGTHS
            for _ in range(EACH if split == "train" else 16)
        ]

    def prompt(self, row):
        return [{"role": "user", "content": f"{row['a']}+{row['b']}="}]

    def reward(self, answer, row):
        return float(answer.strip() == str(row["a"] + row["b"]))


def short_first(items, _step):
    """Only lengths up to the first one whose sums are solved less than half the time."""
    longest = max(LENGTHS)
    for digits in LENGTHS:
        rates = [i.solve_rate for i in items if i.row["digits"] == digits and i.solve_rate]
        if sum(rates) < EACH / 2:
            longest = digits
            break
    return [float(item.row["digits"] <= longest) for item in items]
