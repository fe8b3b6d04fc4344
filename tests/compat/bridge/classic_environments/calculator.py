"""Sums with a calculator, as a user of verifiers before 0.4 writes it."""

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


async def correct(completion, answer) -> float:
    return float((completion[-1]["content"] or "").strip() == answer)


def load_environment() -> vf.Environment:
    rows = [
        {"question": f"What is {a}+{b}?", "answer": str(a + b)} for a in range(3) for b in range(3)
    ]
    return vf.ToolEnv(
        tools=[add], dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[correct]), max_turns=4
    )
