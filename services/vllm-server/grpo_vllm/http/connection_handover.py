"""Keeps clients' connections open while one engine replaces another.

A draining server must not close an idle connection, because a client that sends a request at that
moment would lose it. Instead the connection is *parked*: its descriptor goes to the supervisor. The
kernel keeps the bytes that the client sends, and the next engine reads them. If an answer has not
begun yet, it carries `Connection: close` and its connection is not parked.

The engine reports to the supervisor over a *channel*, a pair of stream sockets: messages of one
byte, of which PARKED comes with a descriptor.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = structlog.get_logger()

FLUSH_POLL_S = 0.01
UNFINISHED_S = 2.0
"""Time for a client to send the rest of a request that it has begun when a drain begins. Afterwards
its connection is closed: it would hold up the next engine for as long as the client likes."""

SERVING, PARKED, DROPPED = b"s", b"p", b"d"

Park = Callable[[int], None]
"""Takes the descriptor of an open connection. The caller closes its own copy afterwards."""


class Handover:
    """Shared by all connections of a server. Inactive until `begin`."""

    def __init__(self) -> None:
        self._park: Park | None = None

    @property
    def begun(self) -> bool:
        return self._park is not None

    def begin(self, park: Park) -> None:
        """Park idle connections from now on."""
        self._park = park

    def take(self, transport: Any) -> None:
        """Park the connection of an asyncio transport and end the transport."""
        assert self._park is not None, "call begin() first"
        descriptor = os.dup(transport.get_extra_info("socket").fileno())
        try:
            # The transport must not read again before the hand-over: those bytes would be lost.
            transport.abort()  # closes only our descriptor; the connection stays open
            self._park(descriptor)
        finally:
            os.close(descriptor)


def handover_protocol(handover: Handover) -> type[HttpToolsProtocol]:
    """A protocol class for `uvicorn.Config(http=...)` whose connections `handover` can park."""

    class HandoverProtocol(HttpToolsProtocol):
        in_request = False
        """True if a part of a request has been read."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if handover.begun:  # it was accepted just before the server stopped accepting
                self.shutdown()

        def on_message_begin(self) -> None:
            self.in_request = True
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            super().on_headers_complete()
            if handover.begun and self.cycle is not None:
                self.cycle.keep_alive = False

        def on_message_complete(self) -> None:
            self.in_request = False
            super().on_message_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if handover.begun and not self.transport.is_closing():
                self.shutdown()

        def shutdown(self) -> None:
            """Called by the server once, when it stops accepting."""
            if not handover.begun:
                super().shutdown()
                return
            if self.in_request:
                self.loop.call_later(UNFINISHED_S, self._close_unfinished)
            if self._waits_for_a_request():
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
            handover.take(self.transport)

        def _waits_for_a_request(self) -> bool:
            answered = self.cycle is None or self.cycle.response_complete
            return answered and not self.in_request

    return HandoverProtocol


class EngineEnd:
    """The engine's end of the channel to the supervisor."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)

    def serving(self) -> None:
        """Report that the engine answers requests now, also on connections that it adopted."""
        self._socket.send(SERVING)

    def park(self, descriptor: int) -> None:
        socket.send_fds(self._socket, [PARKED], [descriptor])

    def dropped(self) -> None:
        """Report a request that was dropped at the end of a drain."""
        self._socket.send(DROPPED)


@dataclass
class SupervisorEnd:
    """The supervisor's end of the channel. Needs a running event loop.

    `parked`: descriptors of the client connections that the engine has handed over.
    """

    parked: list[int] = field(default_factory=list)
    dropped: int = 0
    serving: asyncio.Event = field(default_factory=asyncio.Event)
    _socket: socket.socket | None = None

    def open(self) -> socket.socket:
        """Create a new socket pair; returns the engine's end, which is inheritable."""
        self.close()
        self.serving = asyncio.Event()
        self.dropped = 0
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket, self._read)
        return theirs

    def close(self) -> None:
        """Read the messages that the engine sent before it ended, then close."""
        while self._socket is not None and self._read():
            pass
        self._forget()

    def take_parked(self) -> list[int]:
        """Return all parked descriptors. The caller closes them."""
        taken, self.parked = self.parked, []
        return taken

    def release_parked(self) -> None:
        """Close the parked descriptors, which were copies in case the engine failed to start."""
        for descriptor in self.take_parked():
            os.close(descriptor)

    def _read(self) -> bool:
        """Read one message. False if there is none."""
        assert self._socket is not None
        try:
            # One byte at a time, because a descriptor arrives together with its byte.
            message, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            message, descriptors = b"", []
        if message == SERVING:
            self.serving.set()
        elif message == DROPPED:
            self.dropped += 1
        self.parked += descriptors
        if not message:
            self._forget()
        return bool(message)

    def _forget(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
