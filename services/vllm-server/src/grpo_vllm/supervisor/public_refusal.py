"""The public port while no engine is started any more."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterable

from grpo_vllm.http.server import HttpServer
from grpo_vllm.supervisor.sockets import duplicate
from grpo_vllm.supervisor.unavailable import GivenUp


@contextlib.asynccontextmanager
async def refusing(
    public: socket.socket, reason: str, parked: Iterable[int]
) -> AsyncIterator[None]:
    """Everybody is answered 503 inside the context, those on parked connections too."""
    server = HttpServer(GivenUp(reason))
    serving = asyncio.create_task(server.serve(sockets=[duplicate(public)]))
    try:
        await server.adopt(parked)
        yield
    finally:
        server.should_exit = True
        await serving
