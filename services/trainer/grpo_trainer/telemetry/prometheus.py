"""The newest step's metrics for Prometheus, under names derived from those of the record."""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from grpo_trainer.telemetry.metrics import Record, Stage

PREFIX = "grpo_trainer_"
COUNTED = (
    "data/unusable_groups",
    "data/repeated_groups",
    "data/stale_groups",
    "data/quarantined_batches",
    "checks/failed",
)
"""Numbers of one step, which are added up: a scrape does not see every step."""


def prometheus_name(metric: str) -> str:
    """`train/step_time` → `grpo_trainer_train_step_time`; that of a counter ends in `_total`."""
    name = PREFIX + re.sub(r"\W", "_", metric, flags=re.ASCII)
    return f"{name}_total" if metric in COUNTED else name


class TrainerMetrics(Collector):
    """The metrics of this trainer process. A step hands over its record; the rest is done at a
    scrape, in another thread.

    Args:
        save_path: whose disk is looked at
        clock: Unix time in seconds
    """

    def __init__(self, save_path: Path, clock: Callable[[], float] = time.time) -> None:
        self._save_path = save_path
        self._clock = clock
        self._record: Mapping[str, float] = {}
        self._totals: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self._steps = 0
        self._stage: Stage | None = None
        self._last_step_at = 0.0

    def enter(self, stage: Stage) -> None:
        """A stage of a step begins."""
        if self._stage is None:
            self._last_step_at = self._clock()
        self._stage = stage

    def write(self, record: Record) -> None:
        """A step has ended."""
        self._last_step_at = self._clock()
        self._steps += 1
        for name in COUNTED:
            self._totals[name] += int(record.get(name, 0))
        self._record = record

    def collect(self) -> Iterator[Metric]:
        """Before the first step begins, only those that need none."""
        yield CounterMetricFamily(
            f"{PREFIX}steps_taken", "Number of steps that this process has taken.", self._steps
        )
        yield GaugeMetricFamily(
            f"{PREFIX}disk_free_bytes",
            "Free bytes on the disk of --save-path.",
            shutil.disk_usage(self._save_path).free,
        )
        for name in COUNTED:
            meaning = f"Sum of the metric {name} over the steps of this process."
            yield CounterMetricFamily(
                prometheus_name(name).removesuffix("_total"), meaning, self._totals[name]
            )
        if self._stage is None:
            return
        yield GaugeMetricFamily(
            f"{PREFIX}last_step_timestamp_seconds",
            "Unix time at which the newest step of this process ended, or its first one began.",
            self._last_step_at,
        )
        stage = GaugeMetricFamily(
            f"{PREFIX}stage", "1 for the stage that the trainer is in, else 0.", labels=["stage"]
        )
        for each in Stage:
            stage.add_metric([each.value], float(each is self._stage))
        yield stage
        # Two metrics whose names differ in special characters only are one.
        shown = {
            prometheus_name(name): (name, value)
            for name, value in self._record.items()
            if name not in COUNTED
        }
        for name, (metric, value) in shown.items():
            yield GaugeMetricFamily(name, f"Metric {metric} of the newest step.", value)
