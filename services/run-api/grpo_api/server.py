"""Runs uvicorn with a graceful stop at the first signal and a limit on header size."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import signal
import socket
from collections.abc import Generator
from typing import Any

import structlog
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from grpo_core.http_connections import LimitedProtocol
from grpo_core.listening import listen
from grpo_core.protocol import PROTOCOL_HEADER

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_BACKLOG = 2048
_KEEP_ALIVE_S = 75
"""Longer than the polling interval of every client, which is at most a minute."""
MAX_HEAD_BYTES = 64 * 1024
"""Limit after the first read of a connection, which may itself hold 256 KiB."""

log = structlog.get_logger()


class HttpServer(uvicorn.Server):
    """A server that stops gracefully: it answers requests in flight for up to `stop_grace_s`.

    At a stop signal it sets `closing` at once and accepts no new connections. uvicorn's
    own signal handling offers no event for waiting requests, and does not exit with status 0.
    """

    def __init__(
        self, app: ASGIApp, closing: asyncio.Event, host: str, port: int, stop_grace_s: int
    ) -> None:
        self._closing = closing
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
                # Parsing proxy headers costs time, and no code here reads a client's address.
                proxy_headers=False,
                access_log=False,
                log_config=None,
                headers=[PROTOCOL_HEADER],
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn would answer `::` for IPv6 alone.
        listening = sockets or [listen(self.config.host, self.config.port, _BACKLOG)]
        await super().startup(listening)
        log.info("run_api.listening", host=self.config.host, port=self.config.port)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self._stop, number)
        try:
            yield
        finally:
            self._restore_default_signals()

    def stop(self) -> None:
        """End `serve` once the requests in flight are answered."""
        self._closing.set()
        self.should_exit = True

    def _stop(self, number: signal.Signals) -> None:
        grace_s = self.config.timeout_graceful_shutdown
        log.info("run_api.stopping", signal=number.name, grace_s=grace_s)
        self.stop()
        # The next signal ends the process even if the event loop is stuck.
        self._restore_default_signals()

    def _restore_default_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)


class BoundedHeadProtocol(LimitedProtocol):
    """Limits the size of a request line and its headers, which uvicorn and httptools do not.

    If a request is followed by bytes that are not HTTP, uvicorn answers 400, closes the connection
    and still carries out the request. This class marks its client as disconnected instead.
    """

    _in_head = False
    _head_bytes = 0
    _running: RequestResponseCycle | None = None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        continues = self._in_head
        super().data_received(data)
        if not self._in_head:
            self._head_bytes = 0
        elif continues:
            # The first read of this head may begin with the end of the previous body.
            self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"Request head is larger than {MAX_HEAD_BYTES} bytes.")

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(msg)
        if self._running is not None:
            # Its answer cannot be sent: uvloop raises on a closed transport.
            self._running.disconnected = True
            self._running.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)


KEPT_BYTES = 64 * 1024 * 1024
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h; mallopt(3)


def keep_freed_memory() -> None:
    """Raise both of malloc's thresholds. Does nothing without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # glibc accepts at most 32 MiB for the mmap threshold.
        mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES // 2)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


class StructlogHandler(logging.Handler):
    """Logs a library's record as an event, with the fields bound to the current request."""

    def emit(self, record: logging.LogRecord) -> None:
        log.log(
            record.levelno,
            record.getMessage().strip(),
            logger=record.name,
            exc_info=record.exc_info or None,
        )


def forward_library_logs() -> None:
    """Forward warnings and errors, but not info: uvicorn only repeats our own start and stop."""
    logging.basicConfig(handlers=[StructlogHandler()], level=logging.WARNING, force=True)
