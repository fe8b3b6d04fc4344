"""How well answers follow the requested format."""

from __future__ import annotations

import pytest

from grpo_env.grading.formats import Form, is_think_answer, read_form
from grpo_env.grading.parts import marked_number_format, think_answer_format


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("", Form.NONE),
        ("no idea", Form.NONE),
        ("18 it is", Form.NONE),
        ("it is 18.", Form.ENDS_IN_NUMBER),
        ("so\n$1,080.50", Form.BARE_NUMBER),
        ("#### 17\n#### 18", Form.BARE_NUMBER),
        ("9 * 2 = 18\n#### -18\n\n", Form.MARKED_NUMBER),
        ("#### 18 dollars", Form.NONE),
    ],
)
def test_each_step_towards_the_marked_number_earns_a_third(text: str, form: Form) -> None:
    assert read_form(text) == form
    assert marked_number_format(text) == pytest.approx(form / 3)
    assert marked_number_format(text, finished=False) == 0.0


GOOD = "<think>\n3 - 2\n</think>\n<answer>So \\boxed{\\frac{1}{2}} it is.</answer>\n"


@pytest.mark.parametrize(
    ("good", "text"),
    [
        (True, GOOD),
        (True, GOOD.replace("\n", "")),
        (False, "Well. " + GOOD),
        (False, GOOD + "Bye"),
        (False, GOOD.replace("</think>", "</think> so ")),
        (False, GOOD.replace("</think>", "")),
        (False, GOOD.replace("<think>", "<think><think>")),
        (False, GOOD.replace("</answer>", "</answer><answer>7</answer>")),
        (False, GOOD.replace("\\boxed", "")),
        (False, GOOD.replace("}}", "}")),
        (False, "<answer>\\boxed{1}</answer> <think> </think>"),
        (False, ""),
    ],
)
def test_think_then_answer_in_a_box_and_nothing_else(good: bool, text: str) -> None:
    assert is_think_answer(text) is good
    assert think_answer_format(text) == float(good)
    assert think_answer_format(text, finished=False) == 0.0
