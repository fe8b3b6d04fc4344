"""The 8,792 references of GSM8K: right against themselves, wrong against perturbed numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest

from grpo_env.maths.final_answer import find_result
from grpo_env.maths.numbers import exact_verdict
from grpo_env.tasks.gsm8k import marked_number_format

DATA = Path(__file__).parents[5] / "shared" / "data" / "gsm8k"
REFERENCES = 8792

ANSWERS = (
    "16 - 3 = 13\n#### {}",
    "16 - 3 = 13, so \\boxed{{{}}}.",
    "<think>16 - 3</think> <answer>{}</answer>",
    "<think>16 - 3</think> <answer>It is \\boxed{{{}}}.</answer>",
    "16 - 3 = 13\n{}",
)
SPELLINGS: tuple[Callable[[Decimal], str], ...] = (
    lambda number: f"{number}",
    lambda number: f"{number:,}",
    lambda number: f"${number:,}",
    lambda number: f"{number} dollars",
    lambda number: f"{number:,} km/h",
    lambda number: f"{number}%",
    lambda number: f"{number:.2f}" if number == round(number, 2) else f"{number}",
)


@pytest.fixture(scope="module")
def solutions() -> list[str]:
    files = [DATA / f"{split}.jsonl" for split in ("train", "test")]
    if not all(file.is_file() for file in files):
        pytest.skip(f"no GSM8K data: {DATA} needs train.jsonl and test.jsonl")
    lines = [line for file in files for line in file.read_text().split("\n") if line]
    return [json.loads(line)["answer"] for line in lines]


def perturbed(number: Decimal) -> set[Decimal]:
    """Plus one, other sign, two digits swapped, times ten, decimal point shifted."""
    digits = str(number)
    swaps = (
        Decimal(digits[:at] + digits[at + 1] + digits[at] + digits[at + 2 :])
        for at in range(len(digits) - 1)
        if "-" not in digits[at : at + 2] and digits[at] != digits[at + 1]
    )
    return {number + 1, -number, next(swaps, number), number * 10, number / 10} - {number}


def stated(number: Decimal, which: int) -> str:
    """The result as it is found in an answer; `which` chooses form and spelling."""
    spelling = SPELLINGS[which // len(ANSWERS) % len(SPELLINGS)]
    result = find_result(ANSWERS[which % len(ANSWERS)].format(spelling(number)))
    assert result is not None
    return result


def test_all_references_are_right_and_their_perturbations_wrong(solutions: list[str]) -> None:
    """Each in two of the 35 combinations of form and spelling, and as the data set writes it."""
    assert len(solutions) == REFERENCES
    for index, solution in enumerate(solutions):
        gold = solution.rpartition("####")[2].strip()
        number = Decimal(gold.replace(",", ""))
        assert (find_result(solution), marked_number_format(solution)) == (gold, 1.0)
        for which in (index, index + 17):
            assert exact_verdict(stated(number, which), gold) is True
        for shift, wrong in enumerate(perturbed(number)):
            assert exact_verdict(stated(wrong, index + shift), gold) is False, f"{wrong} {gold}"
