from __future__ import annotations

import pytest

from grpo_env.tasks import Answer
from grpo_env.tasks.final_answer import LONGEST_RESULT_CHARS, Form, read_final_answer

MARKED, BARE, ENDS, NONE = Form.MARKED_NUMBER, Form.BARE_NUMBER, Form.ENDS_IN_NUMBER, Form.NONE


@pytest.mark.parametrize(
    ("text", "result", "form"),
    [
        ("9 eggs at 2 dollars.\n#### $1,080.50\n\n", "$1,080.50", MARKED),
        ("####-3", "-3", MARKED),
        ("#### " + "7" * (LONGEST_RESULT_CHARS + 1), None, MARKED),
        # The right number in another form.
        ("so it is\n18%", "18%", BARE),
        ("#### 17\nno\n#### 18", "18", BARE),
        ("#### \\boxed{17}\n#### 18", "18", BARE),
        ("she makes 18.", None, ENDS),
        ("#### 18 dollars", "18 dollars", NONE),
        ("#### 18\nGood luck!", "18", NONE),
        (r"so \boxed{18}.", r"\boxed{18}.", NONE),
        # Nothing stated.
        ("\n \n", None, NONE),
        ("####", None, NONE),
        ("18 eggs", None, NONE),
        ("\u0661\u0668", None, NONE),
    ],
)
def test_the_last_marked_place_is_the_result_and_the_last_line_has_the_form(
    text: str, result: str | None, form: Form
) -> None:
    final = read_final_answer(Answer(text))

    assert (final.result, final.form) == (result, form)


@pytest.mark.parametrize(
    ("text", "result"), [("#### 18", None), ("#### 17\n#### 1", "17"), ("17\nand then\n", None)]
)
def test_an_answer_that_was_cut_off_has_no_form_and_its_last_line_is_not_read(
    text: str, result: str | None
) -> None:
    final = read_final_answer(Answer(text, finished=False))

    assert (final.result, final.form) == (result, NONE)
