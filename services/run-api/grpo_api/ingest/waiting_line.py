"""A first-in, first-out line of requests that wait for room in the queue."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from grpo_api.errors import QueueFull, ShuttingDown, StoreUnavailable
from grpo_api.http.shutdown import Lifetime, was_held

_FIRST_POLL_S = 0.05
_OTHERS_POLL_S = 0.5
MAX_WAITING = 256
"""Limit on waiting requests, because each one polls."""


class WaitingLine:
    """The line of waiting requests. `max_bytes`: limit on the memory of all of them together."""

    def __init__(self, lifetime: Lifetime, max_bytes: int) -> None:
        self._lifetime = lifetime
        self._max_bytes = max_bytes
        self._bytes = 0
        self._tickets: deque[Ticket] = deque()

    @property
    def is_empty(self) -> bool:
        return not self._tickets

    @contextmanager
    def place(self, size: int) -> Iterator[Ticket]:
        """A place at the end of the line, for a request of `size` bytes.

        Raises:
            QueueFull: the line has reached its limit in requests or in bytes.
        """
        if len(self._tickets) == MAX_WAITING or self._bytes + size > self._max_bytes:
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
        was_held.set(True)
        try:
            async with asyncio.timeout(_FIRST_POLL_S if self.is_first else _OTHERS_POLL_S):
                await self.called.wait()
        except TimeoutError:
            pass
        self.called.clear()
        if self._lifetime.closing.is_set():
            raise ShuttingDown


@asynccontextmanager
async def in_turn(turns: asyncio.Lock, patience_s: float, reason: str) -> AsyncIterator[None]:
    """Hold the lock during the block.

    Raises:
        StoreUnavailable: the lock was not free within `patience_s`; `reason` is the message.
    """
    try:
        async with asyncio.timeout(patience_s):
            await turns.acquire()
    except TimeoutError as error:
        raise StoreUnavailable(reason) from error
    try:
        yield
    finally:
        turns.release()
