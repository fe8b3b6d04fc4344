"""Requests under way, behind the readiness gate. Plain ASGI.

Each request remembers which *generation of weights* was current when it came in, so that an adapter
is unloaded only when no request can use it any more. A drain that takes too long ends each of them
with 503.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from grpo_vllm.http.readiness_gate import refuse, samples_nothing

T = TypeVar("T")

GIVEN_UP = "the engine is about to restart, and this request outlasted the drain; send it again"


@dataclass(eq=False)
class _Request:
    generation: int
    task: asyncio.Task[None]
    given_up: bool = False


@dataclass
class InFlight:
    """`on_dropped`: called for each request that is given up."""

    generation: int = 0
    on_dropped: Callable[[], None] = field(default=lambda: None)
    _requests: set[_Request] = field(default_factory=set)
    _fewer: asyncio.Event = field(default_factory=asyncio.Event)

    def __len__(self) -> int:
        return len(self._requests)

    def next_generation(self) -> int:
        """Requests that come in from now on count to a new one, which is returned."""
        self.generation += 1
        return self.generation

    async def finished_up_to(self, generation: int) -> None:
        """Until no request is left that came in while `generation`, or an earlier one, was
        current."""
        while any(request.generation <= generation for request in self._requests):
            self._fewer.clear()
            await self._fewer.wait()

    def give_up_all(self) -> None:
        """End every request with a 503 or, where its answer has begun, by breaking it off."""
        for request in self._requests:
            request.given_up = True
            request.task.cancel()
            self.on_dropped()

    async def pass_on(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Have `app` answer the request; count it meanwhile, where it samples."""
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

        # A task of its own: cancelling it must not cancel the server's.
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
    """The work's result; None, with the work cancelled, once the client has gone.

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
    # The body has been read, so the next message can only be the end of the connection.
    while (await receive())["type"] != "http.disconnect":
        pass
