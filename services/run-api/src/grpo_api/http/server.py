"""uvicorn, ended by the first signal gracefully and by the second at once."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Generator

import structlog
import uvicorn
from starlette.types import ASGIApp

from grpo_api.http.bounded_head import BoundedHeadProtocol
from grpo_api.http.lifetime import Lifetime

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_BACKLOG = 2048
_KEEP_ALIVE_S = 75
"""Above the interval of every client that asks again and again: the longest is a minute."""

_log = structlog.get_logger()


class HttpServer(uvicorn.Server):
    """Told to stop, it closes `lifetime` at once, takes no new connections, and lets requests
    under way finish for up to `stop_grace_s`. uvicorn's own handling would set nothing that a
    request can wait on, and would end the process by the signal instead of with status 0.
    """

    def __init__(
        self, app: ASGIApp, lifetime: Lifetime, host: str, port: int, stop_grace_s: int
    ) -> None:
        self._lifetime = lifetime
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                http=BoundedHeadProtocol,
                ws="none",
                lifespan="on",
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=stop_grace_s,
                # nobody here reads a client's address, and every request would pay for it
                proxy_headers=False,
                access_log=False,
                log_config=None,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        _log.info("listening", host=self.config.host, port=self.config.port)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self._stop, number)
        try:
            yield
        finally:
            self._leave_signals_to_the_kernel()

    def _stop(self, number: signal.Signals) -> None:
        grace_s = self.config.timeout_graceful_shutdown
        _log.info("stopping", signal=number.name, grace_s=grace_s)
        self._lifetime.closing.set()
        self.should_exit = True
        # the next signal ends the process even where the event loop is stuck
        self._leave_signals_to_the_kernel()

    def _leave_signals_to_the_kernel(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
