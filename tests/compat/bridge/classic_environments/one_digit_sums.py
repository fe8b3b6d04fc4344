"""One-digit sums, as a user of verifiers before 0.4 writes it."""

import verifiers as vf
from datasets import Dataset


def correct(completion, answer) -> float:
    return 1.0 if completion[-1]["content"].strip() == answer else 0.0


def is_short(completion) -> float:
    return 1.0 if len(completion[-1]["content"]) <= 3 else 0.0


def load_environment(largest: int = 9, with_evaluation: bool = False) -> vf.Environment:
    numbers = range(largest + 1)
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in numbers for b in numbers]
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:3]) if with_evaluation else None,
        system_prompt="Answer with the number.",
        rubric=vf.Rubric(funcs=[correct, is_short], weights=[1.0, 0.25]),
    )
