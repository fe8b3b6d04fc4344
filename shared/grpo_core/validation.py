"""Formats pydantic's validation errors as one short line."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

_MAX_LISTED = 3


def problems_of(error: ValidationError) -> str:
    """`scores.0: Input should be a valid number; tokens: Field required (and 2 more)`"""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    listed = [
        f"{'.'.join(map(str, problem['loc'])) or 'value'}: {message_of(problem)}"
        for problem in found[:_MAX_LISTED]
    ]
    more = len(found) - len(listed)
    return "; ".join(listed) + (f" (and {more} more)" if more else "")


def message_of(problem: Any) -> str:
    """The message of one entry of `ValidationError.errors()`, without pydantic's prefix."""
    message: str = problem["msg"]
    return message.removeprefix("Value error, ")
