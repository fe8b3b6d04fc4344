"""Reads what a reward returned: numbers of any library, named parts, or nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from grpo_core.wire.fields import FLOAT32_MAX
from grpo_env.tasks import Graded

SINGLE = "reward"
"""The name of the only part, if a reward is a single number."""


class RewardInvalid(ValueError):
    """A reward returned something that is not a number or named numbers."""


def graded_of(value: Any) -> Graded:
    """What a reward returned, as named finite numbers. None stays None: a part that says nothing
    about this answer.

    Args:
        value: a number; a dict of numbers; `Graded`. Numbers may be of numpy or torch: scalars,
            and arrays without a dimension.

    Raises:
        RewardInvalid: it is anything else, it is empty, every part is None, or a number is beyond
            float32.
    """
    if isinstance(value, Graded):
        score = None if value.score is None else _number(SINGLE, value.score)
        return Graded(_numbers(value.parts, score is not None), str(value.reason), score)
    if isinstance(value, Mapping):
        return Graded(_numbers(value))
    return Graded(_numbers({SINGLE: value}))


def _numbers(parts: Mapping[Any, Any], may_be_empty: bool = False) -> dict[str, float | None]:
    found = {
        str(name): None if value is None else _number(str(name), value)
        for name, value in parts.items()
    }
    if not (may_be_empty or found):
        raise RewardInvalid("the reward is empty; expected a number, or a dict of named numbers")
    if not may_be_empty and all(value is None for value in found.values()):
        raise RewardInvalid(
            "the reward is None; a part may be None, or one of several rewards, but not all"
        )
    return found


def _number(name: str, value: Any) -> float:
    which = "the reward" if name == SINGLE else f"the part {name!r} of the reward"
    plain = value.item() if getattr(value, "shape", None) == () else value
    if not isinstance(plain, Real):  # bool is Real too
        raise RewardInvalid(
            f"{which} is {value!r}, a {type(value).__name__}; expected a number, or a dict of "
            "named numbers"
        )
    try:
        number = float(plain)
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    if not abs(number) <= FLOAT32_MAX:
        raise RewardInvalid(f"{which} is {number:g}, which is not finite in float32")
    return number
