"""What `GET /metrics` tells Prometheus: requests of this process, and the run as Redis has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from grpo_api.observability.run_metrics import run_metrics
from grpo_api.store.run_facts import RunFacts

_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0),
)


@dataclass(frozen=True)
class Exposition:
    """The answer to a scrape."""

    body: bytes
    content_type: str


class Metrics:
    """One per application, on a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._requests = Counter(
            "run_api_requests",
            "Requests answered.",
            ["method", "route", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "run_api_request_duration_seconds",
            "Seconds from a request's headers to the end of its answer.",
            ["route"],
            buckets=_BUCKETS_S,
            registry=self._registry,
        )
        self._body_bytes = Counter(
            "run_api_request_body_bytes",
            "Bytes of request bodies, as sent.",
            ["route"],
            registry=self._registry,
        )

    def observe(
        self, method: str, route: str, status: int, seconds: float, body_bytes: int
    ) -> None:
        self._requests.labels(method, route, status).inc()
        self._seconds.labels(route).observe(seconds)
        self._body_bytes.labels(route).inc(body_bytes)

    def exposition(self, facts: RunFacts | None, accept: str) -> Exposition:
        """All metrics in the format that the scraper accepts; no facts: Redis is away."""
        encode, content_type = choose_encoder(accept)
        return Exposition(encode(_Scrape(self._registry, facts)), content_type)


class _Scrape(Collector):
    def __init__(self, registry: CollectorRegistry, facts: RunFacts | None) -> None:
        self._registry = registry
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        return chain(self._registry.collect(), run_metrics(self._facts))
