"""What a run's alerts look at while it goes on: from run-api, the metrics file and the logs."""

from __future__ import annotations

import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from grpo_core.alerts import FIRST_STEP_S, Measures
from grpo_core.security import authorization
from grpo_runs.report.steps import numbers_of
from grpo_runs.run_directory import RunDirectory
from grpo_runs.watch.followed_file import FollowedFile
from grpo_runs.watch.logs import EnvironmentReport, ServiceLogs
from grpo_runs.watch.services import Processes, created, is_stage_of, read_file, stage_of

READ_TIMEOUT_S = 5.0
SERVERS_S = 3600.0
"""Servers that ran within this time are missed, as in Prometheus' rule."""
_TOTALS = {
    "unusable_groups": "data/unusable_groups",
    "stale_groups": "data/stale_groups",
    "quarantined_batches": "data/quarantined_batches",
    "failed_checks": "checks/failed",
}
"""Fields of `Measures`, and the metrics of steps that are added up."""


class MeasuresReader:
    """Args:
    run: steps that its metrics file already has are left out
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
        self._logs = ServiceLogs(run.logs)
        self._records = FollowedFile(run.metrics)
        self._seen = {hash(line) for line in self._records.read()}
        self._totals: Counter[str] = Counter()
        self._newest: Mapping[str, float] = {}
        self._last_step_at: float | None = None
        self._is_under_way = True
        self._crashes: dict[str, float] = {}
        self._servers: deque[tuple[float, float, float]] = deque()
        self._longest_step_s: float | None = None

    @property
    def step(self) -> int:
        """The newest step; 0 before the first that was read."""
        return int(self._newest.get("step", 0))

    def read(self) -> Measures:
        """Never raises: what cannot be read is unknown."""
        self._read_records()
        found = self._of_run_api()
        processes, stage = read_file(Processes, self._run.services), stage_of(self._run)
        has_begun = processes and stage and is_stage_of(stage, processes.services)
        if self._last_step_at is None and has_begun:  # the first step, and not before a resume
            self._last_step_at = self._clock()
        if self._is_under_way and self._last_step_at is not None:
            usual = FIRST_STEP_S if self._longest_step_s is None else self._longest_step_s
            found["over_step_s"] = self._clock() - self._last_step_at - usual
        self._logs.read_new()
        if self._is_under_way and (worst := self._most_dropping(processes)):
            found["dropped_share"] = worst.numbers["dropped_share"]
            found["details"] = {"dropped_share": f"{worst.for_batch}."}
        found["staleness_mean"] = self._newest.get("staleness/mean")
        found["disk_free_bytes"] = shutil.disk_usage(self._run.path).free
        found |= {field: self._totals[field] for field in (*_TOTALS, "engine_crashes")}
        return Measures(**found)

    def _read_records(self) -> None:
        for line in self._records.read():
            if hash(line) in self._seen:  # a resumed trainer has shortened the file
                continue
            self._seen.add(hash(line))
            try:
                self._newest, self._last_step_at = numbers_of(line), self._clock()
            except ValueError:  # a full disk has cut it
                continue
            took_s = self._newest.get("train/step_time", 0.0)
            self._longest_step_s = max(took_s, self._longest_step_s or 0.0)
            for field, metric in _TOTALS.items():
                self._totals[field] += int(self._newest.get(metric, 0))

    def _most_dropping(self, processes: Processes | None) -> EnvironmentReport | None:
        """Of the environments that run and have reported, the one that drops the largest share."""
        pids, began = (processes.services, processes.runner.created) if processes else ({}, 0.0)
        reports = (
            one
            for name, one in self._logs.sampling.items()
            if one.is_since(began) and name in pids and created(pids[name])
        )
        return max(reports, key=lambda one: one.numbers["dropped_share"], default=None)

    def _of_run_api(self) -> dict[str, Any]:
        try:
            answer = httpx.get(
                self._url, headers=self._headers, timeout=READ_TIMEOUT_S, trust_env=False
            ).raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL):
            return {"run_api_answers": False} if self._is_under_way else {}
        series: dict[str, float] = {}
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                name = sample.name.removeprefix("run_api_")
                if name == "server_crashes_total":
                    self._count_crashes(sample.labels["server"], sample.value)
                elif not sample.labels:
                    series[name] = sample.value
        found: dict[str, Any] = {
            "run_api_answers": True,
            "redis_answers": bool(series.get("redis_up")),
            "oldest_lease_s": series.get("oldest_lease_age_seconds"),
            "refused_groups": series.get("refused_groups_total"),
        }
        if "redis_disk_bytes" in series:
            used = series["redis_append_only_file_bytes"]
            found["redis_disk_share"] = used / series["redis_disk_bytes"]
        step, steps = series.get("step"), series.get("num_steps")
        if step is None or steps is None:  # Redis does not answer
            return found
        # A run without a last batch has 0 steps. So has one whose trainer has not registered.
        self._is_under_way = step < steps or step > 0 == steps
        if self._is_under_way:
            found["oldest_queued_group_s"] = series.get("oldest_queued_group_age_seconds")
            found["environments_alive"] = series.get("environments_alive")
            if "servers" in series:
                found["servers_gone"] = self._servers_gone(
                    series["servers"], series["servers_lost"]
                )
        return found

    def _count_crashes(self, server: str, count: float) -> None:
        """A server may leave and come back. Its count begins at 0 if it was started again."""
        before = self._crashes.get(server, count)
        self._totals["engine_crashes"] += int(count - before if count >= before else count)
        self._crashes[server] = count

    def _servers_gone(self, running: float, lost: float) -> float:
        """How many fewer run than within the last `SERVERS_S`, if one was lost since."""
        now = self._clock()
        self._servers.append((now, running, lost))
        while self._servers[0][0] <= now - SERVERS_S:
            self._servers.popleft()
        if lost == min(then for _, _, then in self._servers):
            return 0.0
        return max(then for _, then, _ in self._servers) - running
