"""Metrics as the code declares them: run-api's for Prometheus, the trainer's healthy ranges."""

from __future__ import annotations

from typing import TYPE_CHECKING

from docs.generate.markdown import table

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


def of_run_api() -> str:
    from prometheus_client.parser import text_string_to_metric_families

    from grpo_api.metrics import Metrics, RunScrape
    from grpo_api.store.run import RunStats
    from grpo_api.store.servers import ServerCounts

    metrics = Metrics(redis_disk_bytes=1)
    metrics.observe("GET", "/", 200, 0.0, 0)
    stats = RunStats._make([0] * len(RunStats._fields))
    exposition = metrics.exposition(RunScrape(stats, [ServerCounts("", True, 0, 0, 0)], 0), "")
    return table(
        ["Metric", "Kind", "Labels", "Meaning"],
        [
            [f"`{_name(family)}`", family.type, _labels(family), family.documentation]
            for family in text_string_to_metric_families(bytes(exposition.body).decode())
            if family.name.startswith("run_api_") and not family.name.endswith("_created")
        ],
    )


def _name(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def _labels(family: Metric) -> str:
    return ", ".join(f"`{name}`" for name in family.samples[0].labels if name != "le")


def healthy_ranges() -> str:
    from grpo_trainer.checks.findings import RANGES

    return table(
        ["Metric", "Healthy", "Advice outside this range"],
        [[f"`{healthy.metric}`", str(healthy), healthy.look_at] for healthy in RANGES],
    )
