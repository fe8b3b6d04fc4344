"""Prometheus metrics: the requests of this process and the state of the run in Redis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.responses import Response

from grpo_api.store.run import RunStats
from grpo_api.store.servers import ServerCounts

_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0),
)
_GAUGES = {
    "step": "The run's starting step plus the number of batches handed out.",
    "num_steps": "The value of run_api_step at which the trainer has all its batches; 0 if it is "
    "unknown.",
    "queued_groups": "Number of groups in the queue.",
    "queued_sequences": "Number of sequences in the queue.",
    "queued_bytes": "Compressed size, in bytes, of the groups in the queue.",
    "oldest_queued_group_age_seconds": "Seconds since the oldest group in the queue was queued; 0 "
    "if the queue is empty.",
    "buffered_parts": "Number of partial groups that run-api stores.",
    "buffered_bytes": "Compressed size, in bytes, of all partial groups.",
    "leased_batches": "Number of batches that were handed out and are not acknowledged.",
    "leased_bytes": "Compressed size, in bytes, of all unacknowledged batches.",
    "oldest_lease_age_seconds": "Seconds since the oldest unacknowledged batch was handed out; 0 "
    "if all batches are acknowledged.",
    "environments_alive": "Number of connected environments, which did not disconnect and sent a "
    "request within --environment-timeout-s.",
    "environments_registered": "Number of environments that have registered in this run.",
}
"""Meaning of the fields of `RunStats` that are shown."""
_COUNTERS = {
    "batches_delivered": "Number of batches handed out for the first time.",
    "batches_redelivered": "Number of times that run-api handed out a batch again, after the first "
    "time.",
    "batches_acknowledged": "Number of batches that the trainer acknowledged.",
    "refused_groups": "Number of groups that run-api refused with status 400, 409, 413 or 422 "
    "since the last trainer registered.",
    "lost_groups": "Number of accepted groups that Redis no longer had when it started again.",
}
_SERVER_COUNTERS = {
    "restarts": "Number of engine starts after the first one, for new weights or after a crash.",
    "crashes": "Number of crashes of the engine.",
}


@dataclass(frozen=True)
class RunScrape:
    """What Redis tells about the run. `servers` and `append_only_file_bytes`: None if unknown."""

    stats: RunStats
    servers: list[ServerCounts] | None
    append_only_file_bytes: int | None


class Metrics:
    """The metrics of one application, in their own registry.

    Args: redis_disk_bytes: that Redis' append-only file may take; None if unknown
    """

    def __init__(self, redis_disk_bytes: int | None = None) -> None:
        self._redis_disk_bytes = redis_disk_bytes
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._requests = Counter(
            "run_api_requests",
            "Number of answered requests.",
            ["method", "route", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "run_api_request_duration_seconds",
            "Seconds from receiving a request's headers to the end of the answer.",
            ["route"],
            buckets=_BUCKETS_S,
            registry=self._registry,
        )
        self._body_bytes = Counter(
            "run_api_request_body_bytes",
            "Bytes of all received request bodies, before decompression.",
            ["route"],
            registry=self._registry,
        )

    def observe(
        self, method: str, route: str, status: int, seconds: float, body_bytes: int
    ) -> None:
        self._requests.labels(method, route, status).inc()
        self._seconds.labels(route).observe(seconds)
        self._body_bytes.labels(route).inc(body_bytes)

    def exposition(self, run: RunScrape | None, accept: str) -> Response:
        """All metrics in the format that the scraper accepts. `run`: None if Redis is away."""
        encode, content_type = choose_encoder(accept)
        metrics = chain(self._registry.collect(), _of_run(run, self._redis_disk_bytes))
        scrape = SimpleNamespace(collect=lambda: metrics)
        return Response(encode(scrape), headers={"content-type": content_type})


def _of_run(run: RunScrape | None, redis_disk_bytes: int | None) -> Iterator[Metric]:
    """Metrics of the run; only `run_api_redis_up` if Redis did not answer."""
    yield GaugeMetricFamily(
        "run_api_redis_up", "1 if Redis answered this scrape, else 0.", 0 if run is None else 1
    )
    if run is None:
        return
    for name, meaning in _GAUGES.items():
        yield GaugeMetricFamily(f"run_api_{name}", meaning, getattr(run.stats, name))
    for name, meaning in _COUNTERS.items():
        yield CounterMetricFamily(f"run_api_{name}", meaning, getattr(run.stats, name))
    if run.append_only_file_bytes is not None and redis_disk_bytes is not None:
        yield GaugeMetricFamily(
            "run_api_redis_append_only_file_bytes",
            "Size of Redis' append-only file, in bytes. Present if --redis-disk-bytes is known.",
            run.append_only_file_bytes,
        )
        yield GaugeMetricFamily(
            "run_api_redis_disk_bytes",
            "Bytes of disk that this file may take: --redis-disk-bytes.",
            redis_disk_bytes,
        )
    if run.servers is not None:
        yield from _of_servers(run.servers)


def _of_servers(servers: list[ServerCounts]) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "run_api_servers",
        "Number of inference servers that have not failed, of those that reported themselves "
        "within the last ten seconds. Absent if the run has no server that uses Redis.",
        sum(server.is_running for server in servers),
    )
    yield GaugeMetricFamily(
        "run_api_servers_lost",
        "Number of inference servers that have failed, or that no longer report themselves, "
        "without those that ended because of a stop signal.",
        sum(not server.is_running for server in servers),
    )
    servers = [server for server in servers if server.state]
    step = GaugeMetricFamily(
        "run_api_server_step", "Step of the weights that the server serves.", labels=["server"]
    )
    for server in servers:
        step.add_metric([server.name], server.step)
    yield step
    for name, meaning in _SERVER_COUNTERS.items():
        family = CounterMetricFamily(f"run_api_server_{name}", meaning, labels=["server"])
        for server in servers:
            family.add_metric([server.name], getattr(server, name))
        yield family
