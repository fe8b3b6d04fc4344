"""Where an answer states its result, and how well it keeps to the form that was asked for.

The form is a last line `#### <number>`, as in GSM8K's own solutions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from grpo_env.tasks import Answer

MARK = "####"
BOXED = r"\boxed{"

LONGEST_RESULT_CHARS = 64
"""Longer is no number that anyone asked for, and the longer, the costlier to parse."""

_NUMBER = r"[-+]?\$?[0-9][0-9,]*(?:\.[0-9]+)?%?"
_ENDS_IN_NUMBER = re.compile(rf"(?:.*[^0-9.,])?{_NUMBER}\.?")
_BARE_NUMBER = re.compile(_NUMBER)
_MARKED_NUMBER = re.compile(rf"{MARK} *{_NUMBER}")


class Form(IntEnum):
    """Steps towards the form. Each asks for everything below it as well, so that a policy which
    has found one of them sees the next in its own samples."""

    NONE = 0
    """Cut off, or the last line does not end in a number."""
    ENDS_IN_NUMBER = 1
    BARE_NUMBER = 2
    """The last line is a number, marked or not, and nothing else."""
    MARKED_NUMBER = 3
    """The last line is `#### <number>`, and the mark stands nowhere else."""


@dataclass(frozen=True)
class FinalAnswer:
    """`result` is the one place that counts, as text; None where nothing was stated."""

    result: str | None
    form: Form


def read_final_answer(answer: Answer) -> FinalAnswer:
    """One result per answer, the last one marked: listing numbers gives no second guess.

    Behind the last `####`, else from the last `\\boxed{`, else a last line that is a number. The
    last line of an answer that was cut off is not read: its number may lack digits.
    """
    text = answer.text if answer.finished else answer.text.rpartition("\n")[0]
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    form = _form(lines) if answer.finished else Form.NONE
    result = _result(lines, unmarked_counts=answer.finished)
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
