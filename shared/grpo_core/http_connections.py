"""Limits what connections of HTTP clients take: a client that sends nothing takes an open file and
memory for as long as it likes."""

from __future__ import annotations

import asyncio
import functools
import resource
from typing import ClassVar

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = structlog.get_logger()

_MOST_CONNECTIONS = 16_384
_SHARE_OF_FILES = 0.75
"""The rest is for files and for connections to other services."""


def raise_open_files() -> None:
    """Let this process open as many files as it may. Most systems begin with 1024, for programs
    that use select(2)."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def most_connections() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(_MOST_CONNECTIONS, int(files * _SHARE_OF_FILES))


class LimitedProtocol(HttpToolsProtocol):
    """Closes a connection on which the head of a request does not arrive within the keep-alive
    timeout. uvicorn's own timer begins after the first request, and ends at any byte.

    At the limit of connections, the one that has waited longest for a head is closed, so that
    clients which send requests are answered.
    """

    # Of all servers of this process: they share its open files.
    _all: ClassVar[set[LimitedProtocol]] = set()
    _waiting: ClassVar[dict[LimitedProtocol, asyncio.TimerHandle]] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._all.add(self)
        self._wait_for_head()
        if len(self._all) > (limit := most_connections()):
            _warn(limit)
            longest = next(iter(self._waiting))
            longest._forget()
            longest.transport.close()

    def on_headers_complete(self) -> None:
        self._end_wait()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # no further request has arrived
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self) -> None:
        self._forget()  # another protocol takes the connection
        super().handle_websocket_upgrade()

    def _wait_for_head(self) -> None:
        if self in self._all:
            self._waiting[self] = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _end_wait(self) -> None:
        if timer := self._waiting.pop(self, None):
            timer.cancel()

    def _forget(self) -> None:
        self._all.discard(self)
        self._end_wait()


@functools.cache
def _warn(limit: int) -> None:
    """Once in a process: a flood of connections must not flood the log."""
    log.warning(
        "connections.limit_reached",
        limit=limit,
        effect="the connection that has waited longest for a request is closed for each new one",
        hint="find the client that opens them, or raise the limit of open files (ulimit -n)",
    )
