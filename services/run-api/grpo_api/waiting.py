"""How long requests wait: for an event, or for their turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar

from grpo_api.errors import StoreUnavailable

was_held: ContextVar[bool] = ContextVar("was_held", default=False)
"""Whether this task's request waits on purpose, so that it is not logged as slow."""


async def is_set_within(seconds: float, event: asyncio.Event) -> bool:
    """Wait on purpose; False if `seconds` passed first."""
    was_held.set(True)
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


@asynccontextmanager
async def in_turn(turns: asyncio.Lock, limit_s: float, reason: str) -> AsyncIterator[None]:
    """Hold the lock during the block.

    Raises:
        StoreUnavailable: the lock was not free within `limit_s`; `reason` is the message.
    """
    try:
        async with asyncio.timeout(limit_s):
            await turns.acquire()
    except TimeoutError as error:
        raise StoreUnavailable(reason) from error
    try:
        yield
    finally:
        turns.release()
