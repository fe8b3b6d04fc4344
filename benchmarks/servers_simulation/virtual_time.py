"""An event loop whose clock jumps to the next timer, so that hours pass in seconds.

Coroutines of the product run in it unchanged: `asyncio.sleep`, `timeout` and `loop.time` all follow
the loop's clock. Nothing may wait for a real socket, thread or process.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class NothingLeft(RuntimeError):
    """Every task waits for something that no timer will bring."""


class _Jump(selectors.SelectSelector):
    """Advances the clock by the time that the loop would have slept."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise NothingLeft
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jump.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
