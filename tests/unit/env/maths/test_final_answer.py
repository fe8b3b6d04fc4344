"""Where the result of an answer is found; all references of GSM8K."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest

from grpo_env.maths.final_answer import (
    LONGEST_RESULT_CHARS,
    NUMBER_FORMS,
    find_result,
    last_box,
    last_line,
    marked,
    tagged,
    tagged_box,
)
from grpo_env.maths.numbers import exact_verdict
from grpo_env.tasks.gsm8k import marked_number_format


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("9 eggs at 2 dollars.\n#### $1,080.50\n\n", "$1,080.50"),
        ("#### 17\nno\n#### 18\nGood luck!", "18"),
        ("#### 17 #### 18", "18"),
        ("18\n####", None),
        (r"so \boxed{17}, no, \boxed{18}.", r"\boxed{18}"),
        ("\\boxed{\n\\frac{1}{2}\n}", "\\boxed{\n\\frac{1}{2}\n}"),
        (r"\boxed{\{1, 2\}}", r"\boxed{\{1, 2\}}"),
        (r"\boxed{\text{so } \boxed{18}}", r"\boxed{18}"),
        (r"\boxed{18} and \boxed{19", r"\boxed{18}"),
        (r"} {\boxed{18", None),
        ("<answer>17</answer> <answer> 18 </answer>", "18"),
        (r"<answer>So \boxed{17}: \boxed{18} eggs.</answer> \boxed{19}", r"\boxed{18}"),
        ("<answer></answer>\n18", None),
        ("<answer>18", None),
        ("so it is\n18%", "18%"),
        ("so it is\n18 dollars.\n\n", "18 dollars."),
        ("she makes 18.", None),
        ("17, 18", None),
        ("#### 17\n\\boxed{18}\n<answer>19</answer>\n20", "17"),
        ("#### " + "7" * LONGEST_RESULT_CHARS, "7" * LONGEST_RESULT_CHARS),
        ("18\n#### " + "7" * (LONGEST_RESULT_CHARS + 1), None),
        ("", None),
        (" \n\n ", None),
    ],
)
def test_the_last_result_in_the_first_form_counts(text: str, result: str | None) -> None:
    assert find_result(text) == result


EVERY_FORM = "#### 1\n<answer>2</answer><answer>b \\boxed{3}</answer>\n\\boxed{4}\n5"


def test_a_task_chooses_the_forms() -> None:
    forms = (marked, tagged, tagged_box, last_box, last_line)
    results = ["1", r"\boxed{3}", r"\boxed{3}", r"\boxed{4}", "5"]
    assert [find_result(EVERY_FORM, [form]) for form in forms] == results
    assert find_result(EVERY_FORM, [last_line, marked]) == "5"
    assert find_result(EVERY_FORM, []) is find_result("<answer>18</answer>", [tagged_box]) is None


def test_the_last_line_of_a_cut_off_answer_is_ignored() -> None:
    assert find_result("#### 18\n#### 1", finished=False) == "18"
    assert find_result("#### 18", finished=False) is None
    assert find_result("it is\n18\n20", finished=False) == "18"


@pytest.mark.parametrize(
    "piece", [r"\boxed{", "{", "}", "####", "<answer>", "</answer>", "9", "9,", "a1", "$", " "]
)
def test_a_long_answer_of_nonsense_has_no_result(piece: str) -> None:
    """One pass over the text: quadratic time would be a million times 100,000 steps."""
    text = piece * (100_000 // len(piece))
    assert find_result(text) is None
    assert [find_result(text, [form]) for form in NUMBER_FORMS] == [None] * len(NUMBER_FORMS)


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
