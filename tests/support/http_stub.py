"""A real HTTP server on a real socket, with answers that a test defines."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, dict[str, Any]] | tuple[int, dict[str, Any], dict[str, str]]
"""Status, JSON body and, if needed, headers."""
Route = Callable[[dict[str, Any]], Answer]


class DropConnection(Exception):
    """A route raises this to break the connection before an answer is sent."""


@dataclass
class StubServer:
    """`routes` maps "POST /path" to a function of the JSON body; `seen` lists the received
    requests."""

    url: str
    routes: dict[str, Route]
    seen: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def bodies(self, route: str) -> list[dict[str, Any]]:
        return [body for name, body in self.seen if name == route]


def _unknown(_body: dict[str, Any]) -> tuple[int, Any]:
    return 404, {"detail": "Not Found"}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stub: StubServer

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        length = int(self.headers.get("content-length", 0))
        raw = self.rfile.read(length)
        if len(raw) < length:  # the client has disconnected; this was not a request
            self.close_connection = True
            return
        if self.headers.get("content-encoding") == "gzip":
            raw = gzip.decompress(raw)
        name, body = f"{self.command} {self.path}", json.loads(raw or b"{}")
        self.stub.seen.append((name, body))
        try:
            route = self.stub.routes[name]
        except KeyError:
            route = _unknown
        status, answer, *headers = route(body)
        payload = json.dumps(answer).encode()
        self.send_response(status)
        if self.close_connection:
            self.send_header("connection", "close")
        for header, value in (headers[0] if headers else {}).items():
            self.send_header(header, value)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: object) -> None:
        """Write no log."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that drop their connection, as some tests do."""


@contextmanager
def stub_server(routes: dict[str, Route]) -> Iterator[StubServer]:
    handler = type("Handler", (_Handler,), {})
    with _Server(("127.0.0.1", 0), handler) as server:
        stub = StubServer(f"http://127.0.0.1:{server.server_address[1]}", routes)
        handler.stub = stub  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield stub
        finally:
            server.shutdown()
            thread.join()
