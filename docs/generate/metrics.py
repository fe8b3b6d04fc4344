"""Metrics as the code declares them: those for Prometheus, and the trainer's healthy ranges."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
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
    exposition = metrics.exposition(RunScrape(stats, [ServerCounts("", "serving", 0, 0, 0)], 0), "")
    families = text_string_to_metric_families(bytes(exposition.body).decode())
    return _families(
        family
        for family in families
        if family.name.startswith("run_api_") and not family.name.endswith("_created")
    )


def of_trainer() -> str:
    """Without those that are named after a metric of the record."""
    from grpo_trainer.telemetry.metrics import Stage
    from grpo_trainer.telemetry.prometheus import TrainerMetrics

    metrics = TrainerMetrics(Path())
    metrics.enter(Stage.DATA_FETCH)
    return _families(metrics.collect())


def of_environment() -> str:
    from types import SimpleNamespace as Fake
    from typing import Any

    from grpo_env.prometheus import OF_REPORT, EnvironmentMetrics
    from grpo_env.rollout.producer import GroupCounts

    counts = GroupCounts()
    counts.reported = dict.fromkeys(OF_REPORT, 0)
    server: Any = Fake(url="", answered=Fake(total=lambda: 0), load=0, standing=None)
    pool: Any = Fake(servers=[server])
    pools = {"": {"": 0}}
    return _families(EnvironmentMetrics(counts, pool, lambda: 0, lambda: pools).collect())


def _families(families: Iterable[Metric]) -> str:
    return table(
        ["Metric", "Kind", "Labels", "Meaning"],
        [
            [f"`{_name(family)}`", family.type, _labels(family), family.documentation]
            for family in families
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
