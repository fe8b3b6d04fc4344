"""The run as Prometheus reads it: one metric per fact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from grpo_api.store.run_facts import RunFacts

_GAUGES = {
    "step": ("step", "Batches handed out, counted from the run's starting step."),
    "queued_groups": ("queued_groups", "Groups in the queue."),
    "queued_sequences": ("queued_sequences", "Sequences in the queue."),
    "queued_bytes": ("queued_bytes", "Stored bytes of the groups in the queue."),
    "oldest_queued_age_s": (
        "oldest_queued_group_age_seconds",
        "Age of the oldest group in the queue; 0 where it is empty.",
    ),
    "buffered_parts": ("buffered_parts", "Parts of groups that wait for the rest."),
    "buffered_bytes": ("buffered_bytes", "Stored bytes of the parts that wait for the rest."),
    "leased_batches": ("leased_batches", "Batches handed out and not acknowledged."),
    "leased_bytes": ("leased_bytes", "Stored bytes of the batches that are not acknowledged."),
    "oldest_lease_age_s": (
        "oldest_lease_age_seconds",
        "Seconds that the oldest unacknowledged batch has been out; 0 where there is none.",
    ),
    "environments_alive": ("environments_alive", "Environments that are here: not left, not mute."),
    "environments_registered": ("environments_registered", "Environments that ever registered."),
}
_COUNTERS = {
    "deliveries": ("batches_delivered", "Batches handed out for the first time."),
    "redeliveries": ("batches_redelivered", "Batches handed out again."),
    "acknowledged_batches": ("batches_acknowledged", "Batches that the trainer acknowledged."),
}


def run_metrics(facts: RunFacts | None) -> Iterator[Metric]:
    """Whether Redis told the facts, and where it did, the facts."""
    yield GaugeMetricFamily(
        "run_api_redis_up", "1 where Redis answered this scrape.", 0 if facts is None else 1
    )
    if facts is None:
        return
    values = asdict(facts)
    for field, (name, says) in _GAUGES.items():
        yield GaugeMetricFamily(f"run_api_{name}", says, values[field])
    for field, (name, says) in _COUNTERS.items():
        yield CounterMetricFamily(f"run_api_{name}", says, values[field])
