"""Whether the server goes on, and waits that end early when it does not."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

was_held: ContextVar[bool] = ContextVar("was_held", default=False)
"""Whether the request of this task is answered later on purpose: it is not logged as slow."""


class Lifetime:
    """One per application. `closing` is set the moment the process is told to stop."""

    def __init__(self) -> None:
        self.closing = asyncio.Event()

    async def closes_within(self, seconds: float) -> bool:
        """Wait so long; returns early, and True, where the server is told to stop meanwhile.

        A request that is answered later on purpose, a long poll or a held submission, waits here:
        this marks it, so that it is not logged as slow.
        """
        was_held.set(True)
        try:
            async with asyncio.timeout(seconds):
                await self.closing.wait()
        except TimeoutError:
            return False
        return True
