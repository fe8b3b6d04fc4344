"""What a refused body is answered with: the problems, by place, without the offending input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from grpo_api.errors import Refused

_MAX_PROBLEMS = 20
_MAX_MESSAGE_CHARS = 2000
_MAX_LOCATION_CHARS = 100


def invalid(error: ValidationError) -> Refused:
    """422 for a body that breaks its record. A NaN in the input could not be written as JSON."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return Refused(
        422, listed([{**problem, "loc": ("body", *problem["loc"])} for problem in found])
    )


def listed(problems: Sequence[Any]) -> list[dict[str, Any]]:
    """The first problems, of bounded length."""
    return [_problem(problem) for problem in problems[:_MAX_PROBLEMS]]


def too_large(max_bytes: int) -> Refused:
    return Refused(413, f"body is larger than {max_bytes} bytes; send fewer groups at a time")


def _problem(problem: dict[str, Any]) -> dict[str, Any]:
    return {
        "loc": [
            part if isinstance(part, int) else str(part)[:_MAX_LOCATION_CHARS]
            for part in problem["loc"]
        ],
        "msg": problem["msg"][:_MAX_MESSAGE_CHARS],
        "type": problem["type"],
    }
