"""Rates how well an answer follows the requested format, whether or not its result is right."""

from __future__ import annotations

import re
from enum import IntEnum

from grpo_env.grading.final_answer import ANSWER_TAG, END_OF_ANSWER, MARK, last_box

THINK_TAG, END_OF_THINKING = "<think>", "</think>"

_NUMBER = r"[-+]?\$?[0-9][0-9,]*(?:\.[0-9]+)?%?"
_ENDS_IN_NUMBER = re.compile(rf"(?:.*[^0-9.,])?{_NUMBER}\.?")
_BARE_NUMBER = re.compile(_NUMBER)
_MARKED_NUMBER = re.compile(rf"{MARK} *{_NUMBER}")

_TAGS = (THINK_TAG, END_OF_THINKING, ANSWER_TAG, END_OF_ANSWER)
_THINK_ANSWER = re.compile(
    rf"\s*{THINK_TAG}.*{END_OF_THINKING}\s*{ANSWER_TAG}(.*){END_OF_ANSWER}\s*", re.DOTALL
)


class Form(IntEnum):
    """Steps towards a last line `#### <number>`. Each step includes the previous ones, so that a
    policy that reaches one step also finds the next one in its own samples."""

    NONE = 0
    """The answer was cut off, or its last line does not end in a number."""
    ENDS_IN_NUMBER = 1
    BARE_NUMBER = 2
    """The last line is only a number, with or without the mark."""
    MARKED_NUMBER = 3
    """The last line is `#### <number>`, and no other line contains the mark."""


def read_form(text: str, *, finished: bool = True) -> Form:
    """The step that the last line reaches. `finished`: False if the token limit cut it off."""
    last = text.rstrip().rpartition("\n")[2].strip() if finished else ""
    if _MARKED_NUMBER.fullmatch(last) and text.count(MARK) == 1:
        return Form.MARKED_NUMBER
    if _BARE_NUMBER.fullmatch(last) or _MARKED_NUMBER.fullmatch(last):
        return Form.BARE_NUMBER
    return Form.ENDS_IN_NUMBER if _ENDS_IN_NUMBER.fullmatch(last) else Form.NONE


def is_think_answer(text: str) -> bool:
    """Whether the text is `<think>…</think> <answer>…\\boxed{…}…</answer>` and nothing else.

    Each tag must occur exactly once. If the prompt ends in `<think>`, put it before the completion.
    """
    if any(text.count(tag) != 1 for tag in _TAGS):
        return False
    parts = _THINK_ANSWER.fullmatch(text)
    return parts is not None and last_box(parts[1]) is not None
