"""Scores of the tasks gsm8k and math, worked by hand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_env.maths.math_grader import NotGraded
from grpo_env.tasks import Answer, TaskOptions
from grpo_env.tasks.gsm8k import Gsm8k
from grpo_env.tasks.math import (
    LONGEST_RESULT_CHARS,
    STOP,
    Math,
    boxed,
    find_boxed_answer,
    think_answer_format,
    zero_prompt,
)

ROW = {"question": "How much?", "answer": "#### 18", "gold": "18"}
FORMS = ["#### {}", "{}", "#### {}\nBye", "#### 5\n#### {}", "so\n#### {}", "it is {}", "no {} ?"]


def same_text(answer: str | None, gold: str) -> float:
    """Stands in for the grading process, which has its own tests."""
    if answer and "^" in answer:
        raise NotGraded(f"{answer!r}: not graded within 2 s")
    return float(answer == gold)


@pytest.fixture(scope="module")
def gsm8k() -> Iterator[Gsm8k]:
    with pytest.MonkeyPatch.context() as patch:
        stand_in = SimpleNamespace(accuracy=same_text, close=lambda: None)
        patch.setattr("grpo_env.tasks.gsm8k.MathGrader", lambda: stand_in)
        yield Gsm8k(TaskOptions())


@pytest.fixture(scope="module")
def score(gsm8k: Gsm8k) -> Callable[..., float]:
    def of(text: str, finished: bool = True, format_weight: float = 0.3) -> float:
        parts = gsm8k.reward(Answer(text, finished=finished), ROW).parts
        return (parts["accuracy"] or 0.0) + format_weight * (parts["format"] or 0.0)

    return of


@pytest.mark.parametrize(
    ("text", "finished", "expected"),
    [
        ("9 * 2 = 18\n#### 18", True, 1.3),
        ("9 * 2 = 18\n18", True, 1.2),
        ("#### 18\nI hope th", False, 1.0),
        ("9 + 2 = 11\n#### 11", True, 0.3),
        ("it is 11", True, 0.1),
        ("#### 18\nGood luck!", True, 1.0),
        ("no idea", True, 0.0),
        # The answer is cut off in its last line, so the number may lack digits.
        ("#### 18", False, 0.0),
        ("#### 18\n#### 1", False, 1.0),
        ("#### 17\n#### 18", True, 1.2),
        *(("so\n$1,080.50", True, 0.2), ("#### 1 dollar", True, 0.0), ("1 it is", True, 0.0)),
    ],
)
def test_scores_by_hand(
    score: Callable[..., float], text: str, finished: bool, expected: float
) -> None:
    assert score(text, finished) == pytest.approx(expected)


@given(
    right=st.sampled_from(FORMS[:5]),
    wrong=st.sampled_from(FORMS),
    number=st.integers(-100, 10_000).filter(lambda number: number != 18),
    finished=st.booleans(),
    share=st.floats(0.0, 0.99),
)
def test_a_right_answer_beats_every_wrong_one_whatever_their_form(
    score: Callable[..., float], right: str, wrong: str, number: int, finished: bool, share: float
) -> None:
    wrong_score = score(wrong.format(number), finished, share)
    assert score(right.format(18), True, share) > wrong_score


def test_an_answer_without_a_verdict_raises_and_is_no_zero(gsm8k: Gsm8k) -> None:
    with pytest.raises(NotGraded):
        gsm8k.reward(Answer("#### 9^9^9^9"), ROW)


def test_math_counts_the_box_inside_the_answer() -> None:
    with closing(Math(TaskOptions())) as task:
        row = {"problem": "Half of one?", "final_answer": r"\frac{1}{2}"}
        assert task.prompt(row).endswith("Assistant: <think>")
        thought = "it is one half </think> <answer>"
        # The server leaves the stop string </answer> out.
        assert task.reward(Answer(rf"{thought} \boxed{{0.5}}"), row).parts == {
            "accuracy": 1.0,
            "format": 1.0,
        }
        outside = task.reward(Answer(rf"\boxed{{0.5}} {thought} 0.5"), row)
        assert outside.parts == {"accuracy": 0.0, "format": 0.0}


def test_the_prompt_is_the_published_one() -> None:
    """The hash was computed with Atropos' `prompt_format` and `problem_format`."""
    digest = hashlib.sha256(zero_prompt("How?").encode()).hexdigest()
    assert digest == "dbf461bb6f6e9dadefcd6707b56e182e2c049cec866a387e53170ebcfda4c061"
    assert zero_prompt("Is {x} {problem}?").endswith(
        "This is the problem:\nIs {x} {problem}?\n\nAssistant: <think>"
    )


@pytest.mark.parametrize(
    ("completion", "result"),
    [
        # The stop string is missing from the text.
        (r"2. </think> <answer> \boxed{17}, no, \boxed{\frac{1}{2}} ", r"\boxed{\frac{1}{2}}"),
        (r"2. </think> <answer>\boxed{18}</answer>", r"\boxed{18}"),
        (r"<answer>\boxed{17}</answer> <answer>\boxed{18}", r"\boxed{18}"),
        *((r"2. </think> \boxed{18}", None), (r"\boxed{18} <answer> 18", None)),
        (rf"<answer>\boxed{{{'1' * LONGEST_RESULT_CHARS}}}", None),
    ],
)
def test_the_last_box_in_the_last_answer_counts(completion: str, result: str | None) -> None:
    assert STOP[-1] == "</answer>"
    assert find_boxed_answer(completion) == result
    assert find_boxed_answer(completion + "\n", finished=False) is None


def test_the_gold_answer_gets_a_box_once() -> None:
    assert boxed(r"\sqrt{2}") == r"\boxed{\sqrt{2}}"
    assert boxed(r"so \boxed{2}") == r"so \boxed{2}"


GOOD = "<think>\n3 - 2\n</think>\n<answer>So \\boxed{\\frac{1}{2}} it is.</answer>\n"


@pytest.mark.parametrize(
    ("text", "is_good"),
    [
        *((GOOD, True), (GOOD.replace("\n", ""), True)),
        *(("Well. " + GOOD, False), (GOOD + "Bye", False), ("", False)),
        *((GOOD.replace("</think>", other), False) for other in ("</think> so ", "")),
        (GOOD.replace("<think>", "<think><think>"), False),
        (GOOD.replace("</answer>", "</answer><answer>7</answer>"), False),
        *((GOOD.replace("\\boxed", ""), False), (GOOD.replace("}}", "}"), False)),
        ("<answer>\\boxed{1}</answer> <think> </think>", False),
    ],
)
def test_think_then_answer_in_a_box_and_nothing_else(text: str, is_good: bool) -> None:
    assert think_answer_format(text) == float(is_good)
    assert think_answer_format(text, finished=False) == 0.0
