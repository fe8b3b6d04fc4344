"""The prompt and the results of `math_server_zero`."""

from __future__ import annotations

import hashlib

import pytest

from grpo_env.tasks.math import (
    LONGEST_RESULT_CHARS,
    STOP,
    boxed,
    find_boxed_answer,
    zero_prompt,
)


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
        (r"2. </think> <answer> 18 ", None),
        (r"2. </think> \boxed{18}", None),
        (r"\boxed{18} <answer> 18", None),
        ("", None),
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
