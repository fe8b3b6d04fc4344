"""Rows in the forms of other frameworks: where the right answer is, and in which type."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

from grpo_env.tasks import Message, Row

ANSWER = "answer"
_RIGHT = "ground_truth"
_OF_VERL = "reward_model"


def with_answer(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with the column `answer`, if it has the right answer where verl keeps it:
    `reward_model: {"ground_truth": …}`, or a column `ground_truth`."""
    if not is_missing(row.get(ANSWER)):
        return dict(row)
    nested = row.get(_OF_VERL)
    for holder in (nested, row):
        if isinstance(holder, Mapping) and not is_missing(holder.get(_RIGHT)):
            return {**row, ANSWER: holder[_RIGHT]}
    return dict(row)


def is_missing(value: Any) -> bool:
    """Whether it is null, an empty text or NaN."""
    is_nan = isinstance(value, float) and math.isnan(value)
    return value is None or is_nan or (isinstance(value, str) and not value.strip())


def answer_text(value: Any) -> str:
    """The right answer as one text.

    Args: value: a text, a number, a list of one of them, or a dict with the key `ground_truth`

    Raises:
        ValueError: it is none of them, or empty.
    """
    if isinstance(value, Mapping) and _RIGHT in value:
        return answer_text(value[_RIGHT])
    if isinstance(value, list | tuple) and len(value) == 1:
        return answer_text(value[0])
    if is_missing(value):
        raise ValueError("the right answer is missing: its column is null or empty")
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return str(int(value))
    if isinstance(value, str | Number):
        return str(value)
    if isinstance(value, Sequence):
        raise ValueError(
            f"the right answer is a list of {len(value)}, and only one answer can be compared; "
            "leave one, or write a reward of your own"
        )
    raise ValueError(f"the right answer is a {type(value).__name__}; expected a text or a number")


def question_text(value: Any) -> str:
    """A prompt that a task puts into a text of its own.

    Args: value: a text, or messages of which one is the user's, and others the system's

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, str):
        return value
    messages: Sequence[Message] = value if isinstance(value, list | tuple) else ()
    of_user = [m for m in messages if isinstance(m, dict) and m.get("role") == "user"]
    others = [m for m in messages if m not in of_user]
    is_single = len(of_user) == 1 and all(
        isinstance(m, dict) and m.get("role") == "system" for m in others
    )
    if not is_single or not isinstance(of_user[0].get("content"), str):
        raise ValueError(
            "this task makes its own prompt, so the problem must be a text, or one message of the "
            f"user; found {type(value).__name__} {str(value)[:60]!r}"
        )
    return of_user[0]["content"]


def answer_of(row: Row, columns: Sequence[str]) -> str:
    """The right answer in the first of these columns that the row has. Raises `ValueError`."""
    for column in columns:
        if not is_missing(row.get(column)):
            try:
                return answer_text(row[column])
            except ValueError as error:
                raise ValueError(f"column {column!r}: {error}") from error
    found = ", ".join(row) or "none"
    raise ValueError(f"expected the right answer in {' or '.join(columns)}; found {found}")
