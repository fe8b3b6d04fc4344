"""Serves metrics for Prometheus on their own port, for services that answer no HTTP requests."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, MetricsHandler, ProcessCollector
from prometheus_client.registry import Collector

from grpo_core.errors import GrpoError
from grpo_core.listening import in_url, listen

log = structlog.get_logger()


_MOST_CONNECTIONS = 16
"""Each takes a thread and an open file of a service that needs them for other things."""


class _Handler(MetricsHandler):
    timeout = 5.0


class _Server(ThreadingHTTPServer):
    def __init__(self, listening: socket.socket, handler: type[MetricsHandler]) -> None:
        super().__init__(listening.getsockname(), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self._free = threading.Semaphore(_MOST_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()


class MetricsNotServed(GrpoError):
    """The address of `--metrics-host` and `--metrics-port` cannot be listened on."""


@contextlib.contextmanager
def serving_metrics(host: str, port: int | None, collector: Collector) -> Iterator[None]:
    """Answer `GET /metrics` in a thread while the context is open, with the metrics of `collector`
    and those of this process (`process_*`). Without a port, do nothing.

    Args: collector: called from that thread

    Raises:
        MetricsNotServed: nothing can listen there.
    """
    if port is None:
        yield
        return
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(collector)
    try:
        listening = listen(host, port)
    except OSError as error:
        raise MetricsNotServed(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --metrics-port or "
            "--metrics-host"
        ) from error
    server = _Server(listening, _Handler.factory(registry))
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    log.info("metrics.served", url=f"http://{in_url(host)}:{port}/metrics")
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
