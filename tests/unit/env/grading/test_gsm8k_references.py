"""The 8,792 references of GSM8K: right against themselves, wrong against perturbed numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path

import pytest

from grpo_env.grading.final_answer import find_result
from grpo_env.grading.math_grader import MathGrader
from grpo_env.grading.numbers import exact_verdict
from grpo_env.grading.parts import Form, read_form
from tests.unit.env.grading.conftest import MathVerify

DATA = Path(__file__).parents[5] / "shared" / "data" / "gsm8k"
REFERENCES = 8792
SAMPLE_EVERY = 40

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
FRACTIONS = ("{}/2", "\\frac{{{}}}{{2}}")


@pytest.fixture(scope="module")
def solutions() -> list[str]:
    files = [DATA / f"{split}.jsonl" for split in ("train", "test")]
    if not all(file.is_file() for file in files):
        pytest.skip(f"no GSM8K data: {DATA} needs train.jsonl and test.jsonl")
    lines = [line for file in files for line in file.read_text().split("\n") if line]
    return [json.loads(line)["answer"] for line in lines]


@pytest.fixture(scope="module")
def golds(solutions: list[str]) -> list[str]:
    return [solution.rpartition("####")[2].strip() for solution in solutions]


def perturbed(gold: str) -> set[Decimal]:
    """Plus one, other sign, two digits swapped, times ten, decimal point shifted."""
    number = Decimal(gold.replace(",", ""))
    digits = str(number)
    swaps = (
        Decimal(digits[:at] + digits[at + 1] + digits[at] + digits[at + 2 :])
        for at in range(len(digits) - 1)
        if "-" not in digits[at : at + 2] and digits[at] != digits[at + 1]
    )
    first_swap = next(swaps, number)
    return {number + 1, -number, first_swap, number * 10, number / 10} - {number}


def stated(number: Decimal, which: int) -> str:
    """The result as it is found in an answer; `which` chooses form and spelling."""
    spelling = SPELLINGS[which // len(ANSWERS) % len(SPELLINGS)]
    result = find_result(ANSWERS[which % len(ANSWERS)].format(spelling(number)))
    assert result is not None
    return result


ALL_FORMS = range(len(ANSWERS) * len(SPELLINGS))


def comparisons(golds: list[str]) -> Iterator[tuple[str, str, bool]]:
    """Results found in answers, golds, and whether they are equal. Two forms per gold."""
    for index, gold in enumerate(golds):
        number = Decimal(gold.replace(",", ""))
        for which in (index, index + len(ALL_FORMS) // 2):
            yield stated(number, which), gold, True
        for shift, wrong in enumerate(sorted(perturbed(gold))):
            yield stated(wrong, index + shift), gold, False


def test_perturbations_by_hand() -> None:
    assert perturbed("18") == {19, -18, 81, 180, Decimal("1.8")}
    assert perturbed("-1,012") == {-1011, 1012, -112, -10120, Decimal("-101.2")}
    assert perturbed("0") == {1}


def test_the_reference_solutions_are_found_right_and_in_the_requested_format(
    solutions: list[str], golds: list[str]
) -> None:
    assert len(solutions) == REFERENCES
    for solution, gold in zip(solutions, golds, strict=True):
        assert find_result(solution) == gold
        assert exact_verdict(gold, gold) is True
        assert read_form(solution) == Form.MARKED_NUMBER


@pytest.mark.parametrize("which", ALL_FORMS)
def test_every_form_and_spelling(which: int, golds: list[str]) -> None:
    for gold in golds[which::SAMPLE_EVERY]:
        number = Decimal(gold.replace(",", ""))
        assert exact_verdict(stated(number, which), gold) is True
        assert not any(exact_verdict(stated(wrong, which), gold) for wrong in perturbed(gold))


def test_all_references_are_right_and_their_perturbations_wrong(
    grader: MathGrader, golds: list[str]
) -> None:
    for result, gold, equal in comparisons(golds):
        assert grader.is_equal(result, gold) is equal, f"{result!r} against {gold!r}"


def check_math_verify(math_verify: MathVerify, golds: list[str]) -> None:
    for result, gold, equal in comparisons(golds):
        assert math_verify.respelled(result, gold) is equal, f"{result!r} against {gold!r}"
    for index, gold in enumerate(golds):
        number = Decimal(gold.replace(",", ""))
        result = find_result("#### " + FRACTIONS[index % len(FRACTIONS)].format(2 * number))
        assert result is not None
        assert math_verify.respelled(result, gold), f"{result!r} against {gold!r}"
        assert not math_verify.respelled(result, str(number + 1)), f"{result!r} is not {gold} + 1"


def test_math_verify_itself_agrees_on_a_sample(math_verify: MathVerify, golds: list[str]) -> None:
    check_math_verify(math_verify, golds[:: 2 * SAMPLE_EVERY])


@pytest.mark.full
def test_math_verify_itself_agrees_on_all(math_verify: MathVerify, golds: list[str]) -> None:
    check_math_verify(math_verify, golds)
