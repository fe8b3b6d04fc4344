"""Reports the server's status each second, and at once when it has changed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from grpo_core.weights.servers import REPORT_EVERY_S, ServerStatus

Report = Callable[[ServerStatus], Awaitable[None]]


async def to_nobody(_status: ServerStatus) -> None:
    """The report of a server without Redis."""


class Reporter:
    """Args: news: set when the status has changed"""

    def __init__(self, status: Callable[[], ServerStatus], news: asyncio.Event) -> None:
        self._status = status
        self._news = news
        self._sending = asyncio.Lock()
        self.send: Report = to_nobody

    async def now(self) -> None:
        """Returns when others can read the status of now. One report at a time is sent, so that no
        older one follows."""
        async with self._sending:
            self._news.clear()
            await self.send(self._status())

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.now()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPORT_EVERY_S):
                    await self._news.wait()
