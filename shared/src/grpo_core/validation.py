"""Formats pydantic's validation errors as one short line."""

from __future__ import annotations

from pydantic import ValidationError

_MAX_LISTED = 3


def problems_of(error: ValidationError) -> str:
    """`scores.0: Input should be a valid number; tokens: Field required (and 2 more)`"""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    listed = [
        f"{'.'.join(map(str, problem['loc'])) or 'value'}: {problem['msg']}"
        for problem in found[:_MAX_LISTED]
    ]
    more = len(found) - len(listed)
    return "; ".join(listed) + (f" (and {more} more)" if more else "")
