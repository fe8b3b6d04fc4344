"""Waits for events in tests, with a deadline that only a failing test reaches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

DEADLINE_S = 120.0
"""Not a measurement: a machine with other work may pause for tens of seconds."""
_POLL_S = 0.02


def wait_for(
    read: Callable[[], T], accept: Callable[[T], bool] = bool, deadline_s: float = DEADLINE_S
) -> T:
    """Call `read` until `accept` is true of its value, and return that value.

    A `read` that raises ends the wait: raise when the event can no longer happen.

    Args:
        deadline_s: longer only if engines start

    Raises:
        AssertionError: the deadline passed; the message shows the last value.
    """
    give_up_at = time.monotonic() + deadline_s
    while not accept(value := read()):
        _require_time(give_up_at, deadline_s, value)
        time.sleep(_POLL_S)
    return value


async def wait_for_async(read: Callable[[], T], accept: Callable[[T], bool] = bool) -> T:
    """`wait_for` that lets other tasks run meanwhile."""
    give_up_at = time.monotonic() + DEADLINE_S
    while not accept(value := read()):
        _require_time(give_up_at, DEADLINE_S, value)
        await asyncio.sleep(_POLL_S)
    return value


def _require_time(give_up_at: float, deadline_s: float, value: object) -> None:
    assert time.monotonic() < give_up_at, f"not within {deadline_s:g} s; last seen: {value!r}"
