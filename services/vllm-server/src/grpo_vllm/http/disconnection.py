"""Work for a client that may leave meanwhile."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from starlette.types import Receive

T = TypeVar("T")


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
