"""HTTP servers on sockets that were opened elsewhere; they drain, hand over and end together.

Clients' connections stay open while one engine replaces another. A draining server must not close
an idle connection, because a client that sends a request at that moment would lose it. Instead the
connection is *parked*: its descriptor goes to the supervisor. The kernel keeps the bytes that the
client sends, and the next engine reads them. If an answer has not begun yet, it carries
`Connection: close` and its connection is not parked.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping
from typing import Any

import structlog
import uvicorn
from pydantic import SecretStr
from starlette.types import ASGIApp

from grpo_core.http_connections import LimitedProtocol
from grpo_core.protocol import PROTOCOL_HEADER
from grpo_core.security import App, BearerTokenGuard
from grpo_vllm.middleware import InFlight

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/load", "/version", "/healthz", "/readyz"})
"""Paths that need no API key, for probes and monitors. vLLM leaves the same paths open."""

log = structlog.get_logger()

WATCH_S = 1.0
GRACEFUL_SHUTDOWN_S = 5
BACKLOG = 2048
"""New connections that may wait while no engine runs. The kernel's net.core.somaxconn caps it."""
KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections (httpx 5 s, aiohttp 15 s), so that the client closes
them. A server that closes first can lose a request."""
_STARTED_POLL_S = 0.02
FLUSH_POLL_S = 0.01
UNFINISHED_S = 2.0
"""Time for a client to send the rest of a request that it has begun when a drain begins. Afterwards
its connection is closed: it would hold up the next engine for as long as the client likes."""

Park = Callable[[int], None]
"""Takes the descriptor of an open connection. The caller closes its own copy afterwards."""


def handover_protocol(server: DrainingServer) -> type[LimitedProtocol]:
    """A protocol class for `uvicorn.Config(http=...)` whose idle connections are parked when
    `server` drains."""

    class HandoverProtocol(LimitedProtocol):
        in_request = False
        """True if a part of a request has been read."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if server.draining:  # it was accepted just before the server stopped accepting
                self.shutdown()

        def on_message_begin(self) -> None:
            self.in_request = True
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            super().on_headers_complete()
            if server.draining and self.cycle is not None:
                self.cycle.keep_alive = False

        def on_message_complete(self) -> None:
            self.in_request = False
            super().on_message_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if server.draining and not self.transport.is_closing():
                self.shutdown()

        def shutdown(self) -> None:
            """Called by the server once, when it stops accepting."""
            if not server.draining:
                super().shutdown()
                return
            if self.in_request:
                self.loop.call_later(UNFINISHED_S, self._close_unfinished)
            answered = self.cycle is None or self.cycle.response_complete
            if answered and not self.in_request:
                self._park_once_flushed()
            elif self.cycle is not None and not self.cycle.response_started:
                self.cycle.keep_alive = False
            # Otherwise the answer already said "keep-alive". The connection is parked at its end.

        def _close_unfinished(self) -> None:
            if self.in_request and not self.transport.is_closing():
                log.warning(
                    "connection.closed",
                    reason=f"{UNFINISHED_S:g} s after the engine began to drain, the client has "
                    "not sent the rest of its request",
                )
                self.transport.close()

        def _park_once_flushed(self) -> None:
            if self.transport.is_closing() or self.in_request:
                return
            if self.transport.get_write_buffer_size():
                self.loop.call_later(FLUSH_POLL_S, self._park_once_flushed)
                return
            self._unset_keepalive_if_required()
            server.hand_over(self.transport)

    return HandoverProtocol


class DrainingServer(uvicorn.Server):
    """A uvicorn server without signal handlers. uvicorn's would raise the signal again at the end
    and kill this process before vLLM's processes have ended."""

    def __init__(self, app: ASGIApp) -> None:
        self._park: Park | None = None
        super().__init__(
            uvicorn.Config(
                app,
                access_log=False,
                log_level="warning",
                headers=[PROTOCOL_HEADER],
                http=handover_protocol(self),
                timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S,
                timeout_keep_alive=KEEP_ALIVE_S,
                backlog=BACKLOG,
            )
        )

    @property
    def draining(self) -> bool:
        return self._park is not None

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    def drain(self, within_s: float, park: Park, in_flight: InFlight) -> None:
        """Drain and end, to make room for another engine. Park idle connections, and answer
        requests in flight for up to `within_s` seconds. Then drop the rest."""
        if self.draining:
            return
        log.info("engine.draining", requests_in_flight=len(in_flight), deadline_s=within_s)
        self.config.timeout_graceful_shutdown = math.ceil(within_s) + GRACEFUL_SHUTDOWN_S
        self._park = park
        for connection in list(self.server_state.connections):
            connection.shutdown()
        self.should_exit = True
        asyncio.get_running_loop().call_later(within_s, in_flight.give_up_all)

    def hand_over(self, transport: Any) -> None:
        """Park the connection of an asyncio transport and end the transport."""
        assert self._park is not None, "call drain() first"
        descriptor = os.dup(transport.get_extra_info("socket").fileno())
        try:
            # The transport must not read again before the hand-over: those bytes would be lost.
            transport.abort()  # closes only our descriptor; the connection stays open
            self._park(descriptor)
        finally:
            os.close(descriptor)

    async def adopt(self, descriptors: Iterable[int]) -> None:
        """Serve connections that another process accepted. Waits until the server has started."""
        while not self.started:
            await asyncio.sleep(_STARTED_POLL_S)
        loop = asyncio.get_running_loop()
        for descriptor in descriptors:
            await loop.connect_accepted_socket(self._protocol, socket.socket(fileno=descriptor))

    def _protocol(self) -> asyncio.Protocol:
        protocol: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, listening: socket.socket) -> AsyncIterator[DrainingServer]:
    """`app` answers on `listening` while the context is open. The socket stays open afterwards."""
    server = DrainingServer(app)
    running = asyncio.create_task(server.serve(sockets=[listening.dup()]))
    try:
        yield server
    finally:
        server.should_exit = True
        await running


def require_api_key(app: App, key: SecretStr | None) -> BearerTokenGuard:
    """Require vLLM's API key (`--api-key`, VLLM_API_KEY) on our routes too. None lets every request
    pass."""
    # Browsers send the CORS preflight (OPTIONS) without the key.
    return BearerTokenGuard(app, key, OPEN_PATHS, {"OPTIONS"}, credential="API key")


async def serve_until(ended: Callable[[], bool], servers: Mapping[DrainingServer, int]) -> None:
    """Serve until SIGTERM, SIGINT, the end of one server, or until `ended` returns True. `servers`:
    server → descriptor of its listening socket."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    running = [
        asyncio.create_task(server.serve(sockets=[socket.socket(fileno=descriptor)]))
        for server, descriptor in servers.items()
    ]
    stopped = asyncio.create_task(stop.wait())
    ends = [stopped, *running]
    try:
        while not any(task.done() for task in ends) and not ended():
            await asyncio.wait(ends, timeout=WATCH_S, return_when=asyncio.FIRST_COMPLETED)
        log.info("engine.stopping")
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*running)
    finally:
        stopped.cancel()
