"""Signals a shutdown to waiting requests, so that they end early."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

was_held: ContextVar[bool] = ContextVar("was_held", default=False)
"""Whether this task's request waits on purpose, so that it is not logged as slow."""


class Lifetime:
    """One per application. `closing` is set when the process receives a stop signal."""

    def __init__(self) -> None:
        self.closing = asyncio.Event()

    async def closes_within(self, seconds: float) -> bool:
        """Wait; return True early if the server starts to shut down.

        Long polls and waiting submissions wait here. This marks their request as waiting on
        purpose, so that it is not logged as slow.
        """
        was_held.set(True)
        try:
            async with asyncio.timeout(seconds):
                await self.closing.wait()
        except TimeoutError:
            return False
        return True
