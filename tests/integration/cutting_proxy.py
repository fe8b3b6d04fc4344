"""A TCP proxy that loses a request or its answer on demand, as a killed process does."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum

import httpx

_CHUNK = 65536
_LAST_CHUNK = b"0\r\n\r\n"
_ANSWER_S = 30.0
_GATEWAY_TIMEOUT = b"HTTP/1.1 504 Gateway Timeout\r\ncontent-length: 0\r\n\r\n"


class Cut(Enum):
    """What happens to the next request; after it, all pass again."""

    NOTHING = "nothing"
    REQUEST = "request"
    """The connection closes before the service sees the request."""
    ANSWER = "answer"
    """The service carries the request out; its answer goes nowhere."""
    GATEWAY = "gateway"
    """As ANSWER, and a gateway answers 504 in its place."""


class CuttingProxy:
    """Serves one connection after another; each carries one request."""

    def __init__(self, target: str) -> None:
        url = httpx.URL(target)
        self._target = (url.host, url.port or 80)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.next_cut = Cut.NOTHING
        self._client: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        if self._client is not None:
            with suppress(OSError):  # closed already
                self._client.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                self._client, _ = self._listener.accept()
            except OSError:  # shut down
                return
            with self._client as client, suppress(OSError):  # whoever is left sees it closed
                self._carry(client)

    def _carry(self, client: socket.socket) -> None:
        while request := _message(client):
            cut, self.next_cut = self.next_cut, Cut.NOTHING
            if cut is Cut.REQUEST:
                return
            with socket.create_connection(self._target, _ANSWER_S) as service:
                service.sendall(request)
                answer = _message(service)
            if cut is Cut.ANSWER:
                return
            client.sendall(_GATEWAY_TIMEOUT if cut is Cut.GATEWAY else answer)


def _message(connection: socket.socket) -> bytes:
    """One HTTP message with its body; empty where the other end closes before it is whole."""
    data = b""
    while b"\r\n\r\n" not in data:
        chunk = connection.recv(_CHUNK)
        if not chunk:
            return b""
        data += chunk
    head, _, body = data.partition(b"\r\n\r\n")
    fields = dict(line.split(b":", 1) for line in head.lower().split(b"\r\n")[1:])
    length = int(fields.get(b"content-length", 0))
    chunked = b"chunked" in fields.get(b"transfer-encoding", b"")
    while len(body) < length or (chunked and not body.endswith(_LAST_CHUNK)):
        chunk = connection.recv(_CHUNK)
        if not chunk:
            return b""
        body += chunk
    return head + b"\r\n\r\n" + body


@contextmanager
def cutting_proxy(target: str) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(target)
    try:
        yield proxy
    finally:
        proxy.close()
