"""HTTP parsing with an end: a request whose headers do not stop is refused, not collected."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Beyond the first read of a connection, which is at most 256 KiB."""


class BoundedHeadProtocol(HttpToolsProtocol):
    """Neither uvicorn nor httptools bounds a request line and its headers."""

    _in_head = False
    _head_bytes = 0

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
