"""A proxy that loses a request or its answer on demand, like a killed process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from enum import Enum
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.wait import DEADLINE_S

_BY_HOP = ("connection", "content-length", "transfer-encoding")


class Cut(Enum):
    """Which part of the next request is lost. Later requests pass."""

    NOTHING = "nothing"
    REQUEST = "request"
    """The connection closes before the service receives the request."""
    ANSWER = "answer"
    """The service carries out the request, but its answer is lost."""
    GATEWAY = "gateway"
    """As ANSWER, but a gateway answers 504 instead."""


class CuttingProxy(ThreadingHTTPServer):
    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Relay)
        self.target = target.removeprefix("http://")
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.next_cut = Cut.NOTHING


class _Relay(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: CuttingProxy

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        cut, self.server.next_cut = self.server.next_cut, Cut.NOTHING
        self.close_connection = cut in (Cut.REQUEST, Cut.ANSWER)
        if cut is Cut.REQUEST:
            return
        with closing(HTTPConnection(self.server.target, timeout=DEADLINE_S)) as service:
            service.request(self.command, self.path, body, dict(self.headers.items()))
            answer = service.getresponse()
            content = answer.read()
        if cut is Cut.NOTHING:
            self._answer(answer.status, content, answer.getheaders())
        elif cut is Cut.GATEWAY:
            self._answer(504, b"", [])

    do_POST = do_GET

    def _answer(self, status: int, content: bytes, headers: list[tuple[str, str]]) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in _BY_HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None: ...


@contextmanager
def cutting_proxy(target: str) -> Iterator[CuttingProxy]:
    with CuttingProxy(target) as proxy:
        threading.Thread(target=proxy.serve_forever, args=(0.05,)).start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
