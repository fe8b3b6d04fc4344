"""HTTP servers on sockets that were opened elsewhere; they drain, hand over and end together."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping

import structlog
import uvicorn
from pydantic import SecretStr
from starlette.types import ASGIApp

from grpo_core.security import App, BearerTokenGuard
from grpo_vllm.http.connection_handover import Handover, Park, handover_protocol
from grpo_vllm.http.in_flight import InFlight

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


class DrainingServer(uvicorn.Server):
    """A uvicorn server without signal handlers. uvicorn's would raise the signal again at the end
    and kill this process before vLLM's processes have ended."""

    def __init__(self, app: ASGIApp) -> None:
        self._handover = Handover()
        super().__init__(
            uvicorn.Config(
                app,
                access_log=False,
                log_level="warning",
                http=handover_protocol(self._handover),
                timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S,
                timeout_keep_alive=KEEP_ALIVE_S,
                backlog=BACKLOG,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    def drain(self, within_s: float, park: Park, in_flight: InFlight) -> None:
        """Drain and end, to make room for another engine. Park idle connections (see
        `grpo_vllm.http.connection_handover`), and answer requests in flight for up to `within_s`
        seconds. Then drop the rest."""
        if self._handover.begun:
            return
        log.info("engine.draining", requests_in_flight=len(in_flight), deadline_s=within_s)
        self.config.timeout_graceful_shutdown = math.ceil(within_s) + GRACEFUL_SHUTDOWN_S
        self._handover.begin(park)
        for connection in list(self.server_state.connections):
            connection.shutdown()
        self.should_exit = True
        asyncio.get_running_loop().call_later(within_s, in_flight.give_up_all)

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
    """Require vLLM's API key (`--api-key`, VLLM_API_KEY) on our routes too.

    Args: key: None lets every request pass.
    """
    # Browsers send the CORS preflight (OPTIONS) without the key.
    return BearerTokenGuard(app, key, OPEN_PATHS, {"OPTIONS"}, credential="API key")


async def serve_until(ended: Callable[[], bool], servers: Mapping[DrainingServer, int]) -> None:
    """Serve until SIGTERM, SIGINT, the end of one server, or until `ended` returns True.

    Args:
        servers: server → descriptor of its listening socket
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    watch = asyncio.create_task(_stop_when(ended, stop))
    running = [
        asyncio.create_task(server.serve(sockets=[socket.socket(fileno=descriptor)]))
        for server, descriptor in servers.items()
    ]
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([stopped, *running], return_when=asyncio.FIRST_COMPLETED)
        log.info("engine.stopping")
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*running)
    finally:
        watch.cancel()
        stopped.cancel()


async def _stop_when(ended: Callable[[], bool], stop: asyncio.Event) -> None:
    while not ended():
        await asyncio.sleep(WATCH_S)
    stop.set()
