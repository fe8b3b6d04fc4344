"""Sums of numbers with one to four digits, and a rule that goes from the short to the long ones."""

import random

from grpo_env.tasks import Task

LENGTHS = (1, 2, 3, 4)


class MixedSums(Task):
    max_completion_tokens = 8
    held_out = 0.2
    blocks = False

    def rows(self, split):
        if split == "test":
            return None  # a part of the rows is held out
        drawn, rows = random.Random(0), []
        for digits in LENGTHS:
            for pair in drawn.sample(range(100**digits), 100):
                a, b = divmod(pair, 10**digits)
                rows.append({"a": a, "b": b, "digits": digits})
        return rows

    def prompt(self, row):
        return [{"role": "user", "content": f"{row['a']}+{row['b']}="}]

    def reward(self, answer, row):
        return float(answer.strip() == str(row["a"] + row["b"]))


class ShownSums(MixedSums):
    """The same sums after two worked examples, for a pretrained model."""

    max_completion_tokens = 24

    def prompt(self, row):
        shown = []
        for a, b in [(34, 25), (18, 57), (row["a"], row["b"])]:
            shown += [
                {"role": "user", "content": f"What is {a} + {b}?"},
                {"role": "assistant", "content": f"{a} + {b} = {a + b}"},
            ]
        return shown[:-1]

    def reward(self, answer, row):
        a, b = row["a"], row["b"]
        return float(answer.strip() == f"{a} + {b} = {a + b}")


def short_first(items, _step):
    """The lengths up to the first one whose sums are solved less than half the time."""
    for longest in LENGTHS:
        rates = [item.solve_rate or 0.0 for item in items if item.row["digits"] == longest]
        if sum(rates) < len(rates) / 2:
            break
    return [float(item.row["digits"] <= longest) for item in items]
