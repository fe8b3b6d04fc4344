"""The exposition for given facts. The numbers in Redis: `test_run_api_operations_metrics`."""

from __future__ import annotations

from dataclasses import asdict, fields

from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

from grpo_api.metrics import Metrics
from grpo_api.run_facts import RunFacts

FACTS = RunFacts(**{field.name: 1000 + i for i, field in enumerate(fields(RunFacts))})


def samples(facts: RunFacts | None, metrics: Metrics | None = None) -> dict[str, float]:
    text = (metrics or Metrics()).exposition(facts, "").body.decode()
    return {s.name: s.value for family in parse_text(text) for s in family.samples}


def test_every_fact_is_one_metric() -> None:
    shown = [value for value in samples(FACTS).values() if value in asdict(FACTS).values()]
    assert sorted(shown) == sorted(asdict(FACTS).values())


def test_numbers_that_only_grow_are_counters() -> None:
    families = {f.name: f.type for f in parse_text(Metrics().exposition(FACTS, "").body.decode())}
    counters = {name for name, type_ in families.items() if type_ == "counter"}
    assert {n for n in counters if n.startswith("run_api_batches")} == {
        "run_api_batches_delivered",
        "run_api_batches_redelivered",
        "run_api_batches_acknowledged",
    }


def test_a_duration_is_counted_in_its_bucket_of_this_application_alone() -> None:
    metrics = Metrics()
    metrics.observe("GET", "/status", 200, seconds=0.003, body_bytes=17)
    text = metrics.exposition(None, "").body.decode()
    within = {
        float(sample.labels["le"]): sample.value
        for family in parse_text(text)
        for sample in family.samples
        if sample.name == "run_api_request_duration_seconds_bucket"
    }
    assert (within[0.0025], within[0.005], within[60.0]) == (0, 1, 1)
    assert samples(None, metrics)["run_api_request_body_bytes_total"] == 17
    assert "run_api_requests_total" not in samples(None, Metrics())


def test_openmetrics_only_if_it_is_asked_for() -> None:
    for accept in ("", "*/*", "nonsense"):
        assert Metrics().exposition(FACTS, accept).content_type.startswith("text/plain")
    exposition = Metrics().exposition(FACTS, "application/openmetrics-text; version=1.0.0")
    assert exposition.content_type.startswith("application/openmetrics-text")
    families = parse_openmetrics(exposition.body.decode())  # type: ignore[no-untyped-call]
    assert "run_api_step" in {family.name for family in families}
