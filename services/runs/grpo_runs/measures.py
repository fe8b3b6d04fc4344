"""What a run's alerts look at, read while the run goes on: from run-api and the metrics file."""

from __future__ import annotations

import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from grpo_core.alerts import Measures
from grpo_core.security import authorization
from grpo_runs.report.steps import GrowingFile, numbers_of
from grpo_runs.run_directory import RunDirectory

READ_TIMEOUT_S = 5.0
_TOTALS = {
    "unusable_groups": "data/unusable_groups",
    "stale_groups": "data/stale_groups",
    "quarantined_batches": "data/quarantined_batches",
    "failed_checks": "checks/failed",
}
"""Fields of `Measures`, and the metrics that are added up."""


class MeasuresReader:
    """Args:
    run: whose metrics file is read from its end
    token: the access token of run-api
    clock: in seconds
    """

    def __init__(
        self,
        run: RunDirectory,
        run_api_url: str,
        token: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._url = f"{run_api_url}/metrics"
        self._headers = authorization(token)
        self._clock = clock
        size = run.metrics.stat().st_size if run.metrics.is_file() else 0
        self._records = GrowingFile(run.metrics, size)
        self._totals: Counter[str] = Counter()
        self._newest: Mapping[str, float] = {}
        self._last_step_at = clock()
        self._most_servers = 0.0

    @property
    def step(self) -> int:
        """The newest step; 0 before the first that was read."""
        return int(self._newest.get("step", 0))

    def read(self) -> Measures:
        """Never raises: what cannot be read is unknown."""
        self._read_records()
        found: dict[str, Any] = {
            "since_step_s": self._clock() - self._last_step_at,
            "staleness_mean": self._newest.get("staleness/mean"),
            "disk_free_bytes": shutil.disk_usage(self._run.path).free,
            **{field: self._totals[field] for field in _TOTALS},
        }
        return Measures(**found, **self._of_run_api())

    def _read_records(self) -> None:
        for line in self._records.new_lines():
            try:
                self._newest, self._last_step_at = numbers_of(line), self._clock()
            except ValueError:  # a full disk has cut it
                continue
            for field, metric in _TOTALS.items():
                self._totals[field] += int(self._newest.get(metric, 0))

    def _of_run_api(self) -> dict[str, Any]:
        try:
            answer = httpx.get(
                self._url, headers=self._headers, timeout=READ_TIMEOUT_S, trust_env=False
            ).raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL):
            return {}
        series: defaultdict[str, float] = defaultdict(float)  # summed over the labels
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                series[sample.name.removeprefix("run_api_")] += sample.value
        found: dict[str, Any] = {
            "redis_answers": bool(series["redis_up"]),
            "oldest_lease_s": series.get("oldest_lease_age_seconds"),
            "refused_groups": series.get("refused_groups_total"),
            "engine_crashes": series.get("server_crashes_total"),
        }
        if "redis_disk_bytes" in series:
            used = series["redis_append_only_file_bytes"]
            found["redis_disk_share"] = used / series["redis_disk_bytes"]
        if series.get("step", 0) < series.get("num_steps", 0):
            found["oldest_queued_group_s"] = series["oldest_queued_group_age_seconds"]
            found["environments_alive"] = series["environments_alive"]
            if "servers" in series:
                self._most_servers = max(self._most_servers, series["servers"])
                found["servers_gone"] = self._most_servers - series["servers"]
        return found
