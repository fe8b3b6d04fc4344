"""An event loop whose clock jumps to the next timer when nothing else is left to do.

So a lease of a minute expires at once, but never before the tasks that are ready have run. A
conftest makes it the loop of all async tests of its folder with pytest-asyncio's hook:

    def pytest_asyncio_loop_factories():
        return {"virtual": VirtualTimeLoop}

Threads and sockets are real, so a test must not start a timer while it waits for one of them.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class _Selector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        ready = super().select(0)
        if not ready:
            self.now += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    def stands_still_for(self, seconds: float) -> None:
        """Let time pass without running anything, as if the process was stopped."""
        self._clock.now += seconds

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Wait for real threads without a deadline: virtual time would reach it at once."""
        del timeout
        await super().shutdown_default_executor()
