"""How requests wait: until the server stops, for their turn, and in line for room in the queue."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar

from grpo_api.errors import QueueFull, ShuttingDown, StoreUnavailable

MAX_WAITING = 256
"""Limit on requests in line, because each one polls."""
_FIRST_POLL_S = 0.05
_OTHERS_POLL_S = 0.5

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
        return await _is_set_within(seconds, self.closing)


async def _is_set_within(seconds: float, event: asyncio.Event) -> bool:
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


class WaitingLine:
    """A first-in, first-out line of requests.

    Args:
        max_bytes: limit on the memory of all of them together.
    """

    def __init__(self, lifetime: Lifetime, max_bytes: int) -> None:
        self._lifetime = lifetime
        self._max_bytes = max_bytes
        self._bytes = 0
        self._tickets: deque[Ticket] = deque()

    def __len__(self) -> int:
        return len(self._tickets)

    @contextmanager
    def place(self, size: int) -> Iterator[Ticket]:
        """A place at the end of the line, for a request of `size` bytes.

        Raises:
            QueueFull: the line has reached its limit in requests or in bytes.
        """
        if len(self) == MAX_WAITING or self._bytes + size > self._max_bytes:
            raise QueueFull(0.0)
        ticket = Ticket(self._tickets, self._lifetime)
        self._bytes += size
        self._tickets.append(ticket)
        try:
            yield ticket
        finally:
            self._bytes -= size
            self._tickets.remove(ticket)
            if self._tickets:
                self._tickets[0].called.set()


class Ticket:
    """The place of one request. `called` is set when it becomes the first."""

    def __init__(self, line: deque[Ticket], lifetime: Lifetime) -> None:
        self._line = line
        self._lifetime = lifetime
        self.called = asyncio.Event()

    @property
    def is_first(self) -> bool:
        return self._line[0] is self

    async def wait(self) -> None:
        """Wait before the next attempt: briefly for the first in line, longer for the others.

        Raises:
            ShuttingDown
        """
        await _is_set_within(_FIRST_POLL_S if self.is_first else _OTHERS_POLL_S, self.called)
        self.called.clear()
        if self._lifetime.closing.is_set():
            raise ShuttingDown
