"""Reward parts, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from grpo_env.maths.parts import (
    SHAPING,
    Form,
    is_think_answer,
    length,
    marked_number_format,
    overlong,
    read_form,
    repetition,
    think_answer_format,
)


class Said(str):
    """Text with the fields that the penalties read."""

    def __new__(
        cls, text: str = "", tokens: int = 0, max_tokens: int = 100, finished: bool = True
    ) -> Said:
        said = super().__new__(cls, text)
        said.token_ids = range(tokens)
        said.max_tokens = max_tokens
        said.finished = finished
        return said

    token_ids: range
    max_tokens: int
    finished: bool


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "penalty"),
    [(0, 100, 0.0), (1, 100, -0.01), (50, 100, -0.5), (100, 100, -1.0), (150, 100, -1.0)],
)
def test_length_is_the_used_share_of_the_limit(
    tokens: int, max_tokens: int, penalty: float
) -> None:
    assert length(Said("", tokens, max_tokens)) == pytest.approx(penalty)


@pytest.mark.parametrize(
    ("text", "penalty"),
    [
        ("", 0.0),
        ("one two three", 0.0),
        ("one two three four", 0.0),
        ("one two three four five", 0.0),
        # Words: a b c d a b c d. 4-grams: abcd bcda cdab dabc abcd, so 4 of 5 differ.
        ("a b c d\na B  c d", -0.2),
        # 13 words have 10 4-grams, which are all the same.
        ("no " * 13, -0.9),
    ],
)
def test_repetition_is_the_share_of_repeated_ngrams(text: str, penalty: float) -> None:
    assert repetition(Said(text)) == pytest.approx(penalty)


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    # Limit 100, buffer 20: the penalty starts at 80 tokens.
    [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (120, -1.0)],
)
def test_overlong_falls_in_the_last_fifth_of_the_limit(tokens: int, penalty: float) -> None:
    assert overlong(Said("", tokens)) == pytest.approx(penalty)
    assert overlong(Said("", tokens, finished=False)) == -1.0


@pytest.mark.parametrize("name", SHAPING)
def test_penalties_are_no_rewards_and_handle_100_kb(name: str) -> None:
    assert -1.0 <= SHAPING[name](Said("no " * 33_000, tokens=100)) < -0.9
    assert SHAPING[name](Said("")) == 0.0


@pytest.mark.parametrize("part", [length, overlong])
def test_an_answer_without_a_limit_has_no_share_of_it(part: object) -> None:
    assert callable(part)
    with pytest.raises(ValueError, match="max_tokens of the answer is 0"):
        part(Said("", 1, max_tokens=0))


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
