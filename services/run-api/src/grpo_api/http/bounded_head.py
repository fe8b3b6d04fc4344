"""HTTP parsing with an end: headers that do not stop are refused, and what precedes garbage."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 64 * 1024
"""Beyond the first read of a connection, which is at most 256 KiB."""


class BoundedHeadProtocol(HttpToolsProtocol):
    """Neither uvicorn nor httptools bounds a request line and its headers.

    Where what follows a request is no HTTP, uvicorn answers 400 and closes the connection, and
    would carry out the request before it for nobody. Here that one finds its client gone.
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
            # what came with the beginning may be the end of a body before it
            self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"Request head is larger than {MAX_HEAD_BYTES} bytes.")

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(msg)
        if self._running is not None:
            # its answer could not be sent any more: uvloop raises on a closed transport
            self._running.disconnected = True
            self._running.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)
