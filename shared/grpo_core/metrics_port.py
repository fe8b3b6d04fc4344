"""Serves metrics for Prometheus on their own port, for services that answer no HTTP requests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.registry import Collector

from grpo_core.errors import GrpoError

log = structlog.get_logger()


class MetricsNotServed(GrpoError):
    """The address of `--metrics-host` and `--metrics-port` cannot be listened on."""


@contextlib.contextmanager
def serving_metrics(host: str, port: int, collector: Collector) -> Iterator[None]:
    """Answer `GET /metrics` in a thread while the context is open, with the metrics of `collector`
    and those of this process (`process_*`).

    Args: collector: called from that thread

    Raises:
        MetricsNotServed: nothing can listen there.
    """
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(collector)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise MetricsNotServed(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another "
            "--metrics-port or --metrics-host"
        ) from error
    log.info("metrics.served", url=f"http://{host}:{port}/metrics")
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
