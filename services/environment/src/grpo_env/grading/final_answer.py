"""Finds the result in an answer, and rates how well the answer follows the requested form.

The requested form is a last line `#### <number>`, as in GSM8K's own solutions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

MARK = "####"
BOXED = r"\boxed{"

LONGEST_RESULT_CHARS = 64
"""Longer results are ignored: they are no plausible numbers, and parsing them is slow."""

_NUMBER = r"[-+]?\$?[0-9][0-9,]*(?:\.[0-9]+)?%?"
_ENDS_IN_NUMBER = re.compile(rf"(?:.*[^0-9.,])?{_NUMBER}\.?")
_BARE_NUMBER = re.compile(_NUMBER)
_MARKED_NUMBER = re.compile(rf"{MARK} *{_NUMBER}")


class Form(IntEnum):
    """Steps towards the requested form. Each step includes the previous ones, so that a policy that
    reaches one step also finds the next one in its own samples."""

    NONE = 0
    """The answer was cut off, or its last line does not end in a number."""
    ENDS_IN_NUMBER = 1
    BARE_NUMBER = 2
    """The last line is only a number, with or without the mark."""
    MARKED_NUMBER = 3
    """The last line is `#### <number>`, and no other line contains the mark."""


@dataclass(frozen=True)
class FinalAnswer:
    """`result`: the text of the stated result; None if the answer states none."""

    result: str | None
    form: Form


def read_final_answer(answer: str, finished: bool = True) -> FinalAnswer:
    """Read the one result that counts, so that listing several numbers gives no extra chance.

    The result follows the last `####`, else starts at the last `\\boxed{`, else is a last line that
    is only a number. If the answer was cut off, its last line is ignored: digits may be missing.
    """
    text = answer if finished else answer.rpartition("\n")[0]
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    form = _form(lines) if finished else Form.NONE
    result = _result(lines, unmarked_counts=finished)
    return FinalAnswer(result if result and len(result) <= LONGEST_RESULT_CHARS else None, form)


def _result(lines: list[str], unmarked_counts: bool) -> str | None:
    for sign in (MARK, BOXED):
        signed = [line for line in lines if sign in line]
        if signed:
            return _behind_last(sign, signed[-1])
    if unmarked_counts and lines and _BARE_NUMBER.fullmatch(lines[-1]):
        return lines[-1]
    return None


def _behind_last(sign: str, line: str) -> str:
    before, _, rest = line.rpartition(sign)
    return rest.strip() if sign == MARK else line[len(before) :]


def _form(lines: list[str]) -> Form:
    last = lines[-1] if lines else ""
    if _MARKED_NUMBER.fullmatch(last) and sum(line.count(MARK) for line in lines) == 1:
        return Form.MARKED_NUMBER
    if _BARE_NUMBER.fullmatch(last) or _MARKED_NUMBER.fullmatch(last):
        return Form.BARE_NUMBER
    return Form.ENDS_IN_NUMBER if _ENDS_IN_NUMBER.fullmatch(last) else Form.NONE
