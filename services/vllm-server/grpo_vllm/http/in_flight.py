"""Counts requests in flight, so that adapters are unloaded and engines drained safely.

Each request keeps the *generation number* that was current when it arrived. An adapter is unloaded
only when no request of its generation is left. A drain that exceeds its deadline ends the remaining
requests with status 503.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from grpo_vllm.http.readiness_gate import refuse, samples_nothing

T = TypeVar("T")

GIVEN_UP = (
    "the engine is restarting, and this request did not finish in time; send the request again"
)


@dataclass(eq=False)
class _Request:
    generation: int
    task: asyncio.Task[None]
    given_up: bool = False


@dataclass
class InFlight:
    """`on_dropped`: called for each request that a drain ends early."""

    generation: int = 0
    on_dropped: Callable[[], None] = field(default=lambda: None)
    _requests: set[_Request] = field(default_factory=set)
    _fewer: asyncio.Event = field(default_factory=asyncio.Event)

    def __len__(self) -> int:
        return len(self._requests)

    def next_generation(self) -> int:
        """Start a new generation for requests that arrive from now on; returns its number."""
        self.generation += 1
        return self.generation

    async def finished_up_to(self, generation: int) -> None:
        """Return when no request of this generation or an earlier one is left."""
        while any(request.generation <= generation for request in self._requests):
            self._fewer.clear()
            await self._fewer.wait()

    def give_up_all(self) -> None:
        """End every request: with status 503, or by closing the connection if its answer began."""
        for request in self._requests:
            request.given_up = True
            request.task.cancel()
            self.on_dropped()

    async def pass_on(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Let `app` answer the request. Count the request if it samples tokens."""
        if scope["type"] != "http" or samples_nothing(scope):
            await app(scope, receive, send)
            return
        begun = False

        async def run() -> None:
            await app(scope, receive, note_and_send)

        async def note_and_send(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        # A separate task, because cancelling it must not cancel the server's task.
        task = asyncio.create_task(run())
        request = _Request(self.generation, task)
        self._requests.add(request)
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._requests.discard(request)
            self._fewer.set()
        if request.given_up and not begun:
            await refuse(GIVEN_UP, scope, receive, send, connection="close")
        elif not task.cancelled():
            task.result()


async def unless_disconnected(receive: Receive, work: asyncio.Task[T]) -> T | None:
    """The result of `work`. If the client disconnects first, cancel `work` and return None.

    The request's body must have been read.
    """
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        return None
    finally:
        gone.cancel()
        work.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    # The body has been read, so the next message is the disconnection.
    while (await receive())["type"] != "http.disconnect":
        pass
