"""One run as it is now: its steps, its services, what needs somebody, and how long it will take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from pydantic import ValidationError

from grpo_core.alerts import AlertWatch
from grpo_core.errors import GrpoError
from grpo_core.evaluation.results import ResultsUnusable
from grpo_core.provenance.chain import Provenance, provenance_file
from grpo_core.provenance.records import Publication
from grpo_core.rollouts.files import steps_in
from grpo_core.rollouts.page.encode import Point
from grpo_core.rollouts.record import printable
from grpo_runs.measures import MeasuresReader
from grpo_runs.process.health import HealthProbe
from grpo_runs.process.stack import LAUNCHER
from grpo_runs.report.evaluations import Evaluations
from grpo_runs.report.page import config_of
from grpo_runs.report.steps import numbers_of, pool_curves, speed_text
from grpo_runs.run_directory import RunDirectory
from grpo_runs.watch.followed_file import FollowedFile
from grpo_runs.watch.logs import DROPPED, SENT, ServiceLogs, Warned
from grpo_runs.watch.metrics_log import PARTS, MetricsLog, Row
from grpo_runs.watch.services import (
    STAGES,
    MemorySample,
    Processes,
    ServiceFacts,
    is_stage_of,
    stage_of,
)

REFRESH_EVERY_S = 0.5
RUN_API_TIMEOUT_S = 2.0
TAIL_BYTES = 2**16
"""Of a file of which the last line is enough."""
ETA_STEPS = 20
"""Of so many of the newest steps the median time counts, and the mean time of saving: few steps are
followed by a checkpoint."""


class LiveRun:
    """Follows one run. Threads may use it at once.

    Args:
        id: its name in the page's addresses
        token: the access token of its run-api
    """

    def __init__(
        self,
        id: str,
        run: RunDirectory,
        token: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.id = id
        self.run = run
        self.log = MetricsLog(run.metrics)
        self._logs = ServiceLogs(run.logs)
        self._token = token
        self._clock = clock
        self._lock = threading.Lock()
        self._files_lock = threading.Lock()
        self._refreshed_at = 0.0
        self._memory_file = FollowedFile(run.processes, TAIL_BYTES)
        self._memory: Mapping[str, int] = {}
        self._api: tuple[str, MeasuresReader] | None = None
        self._api_away_since: float | None = None
        self._alerts = AlertWatch()
        self._noticed: dict[str, float] = {}
        self._state: dict[str, Any] = {}
        self._evaluated: tuple[int, int] = (0, 0)
        self._evaluations = Evaluations(())
        self._provenance: tuple[tuple[int, int], Provenance] | None = None

    @cached_property
    def _probe(self) -> HealthProbe:
        """Of its run-api. To open it takes 50 ms, and a run that has ended needs none."""
        return HealthProbe(self._token, RUN_API_TIMEOUT_S)

    @property
    def name(self) -> str:
        """The id of the run, or that of the page if its file is broken."""
        with suppress(GrpoError):
            return self.run.run_id
        return self.id

    def settings(self) -> dict[str, Any]:
        """By option; empty if they are not known."""
        with suppress(OSError, GrpoError):
            return dict(config_of(self.run))
        return {}

    def state(self) -> dict[str, Any]:
        """What the event `state` of the page holds. Reads what is new, if the last time was not
        just now."""
        with self._lock:
            now = self._clock()
            if not self._state or now - self._refreshed_at >= REFRESH_EVERY_S:
                self._refreshed_at = now
                self._state = self._read(now)
            return self._state

    def listed(self) -> dict[str, Any]:
        """State and step from the end of the metrics file, and steps: a run that nobody looks at is
        not read."""
        lines = [*FollowedFile(self.run.metrics, TAIL_BYTES).read()]
        step, steps = 0, None
        with suppress(ValueError, KeyError, IndexError):  # a broken line
            newest = numbers_of(lines[-1])
            step, steps = int(newest["step"]), int(newest["steps"])
        processes = Processes.read(self.run.services)
        word = self._word(processes, step, steps)
        return {"state": word, "step": step, "steps": steps or self.settings().get("steps")}

    def read_files(self) -> MetricsLog:
        """Read the new steps alone, without asking run-api, which may take seconds to answer."""
        with self._files_lock:
            self.log.read_new()
        return self.log

    def rows_since(self, serial: int) -> tuple[list[Row], int]:
        """The newer rows, also if another page has read them, and the restarts of the log."""
        with self._files_lock:
            return self.log.since(serial), self.log.restarts

    def evaluations(self) -> Evaluations:
        """Those in the file now; the earlier ones while it is broken."""
        with suppress(OSError, ResultsUnusable):
            facts = self.run.evaluations.stat()
            if self._evaluated != (facts.st_size, facts.st_mtime_ns):
                self._evaluations = Evaluations.read(self.run.evaluations)
                self._evaluated = facts.st_size, facts.st_mtime_ns
        return self._evaluations

    def provenance(self) -> Provenance:
        """Without the digests of tensors, which are most of it. Read again only if the file has
        changed.

        Raises:
            BrokenProvenance: there is no record, or it cannot be read.
        """
        facts = provenance_file(self.run.path).stat()
        state = facts.st_size, facts.st_mtime_ns
        if self._provenance is None or self._provenance[0] != state:
            read = Provenance.of(self.run.path)
            lines = [
                line.model_copy(update={"digests": ()}) if isinstance(line, Publication) else line
                for line in read.lines
            ]
            self._provenance = state, replace(read, lines=lines)
        return self._provenance[1]

    def pools(self) -> Mapping[str, list[Point]]:
        """The curves of the curricula; empty while a file is broken."""
        with suppress(OSError, GrpoError):
            return pool_curves(self.run.curricula)
        return {}

    def rollouts(self, kind: str) -> Path | None:
        """The directory of those that were trained on, or of a kind of others."""
        return self.run.untrained_rollouts.get(kind) if kind else self.run.rollouts

    def steps_with_rollouts(self, kind: str = "") -> list[int]:
        """In order; empty while there are none."""
        with suppress(OSError, GrpoError):
            directory = self.rollouts(kind)
            return [] if directory is None else steps_in(directory)
        return []

    def _read(self, now: float) -> dict[str, Any]:
        self.read_files()
        self._logs.read_new()
        self.evaluations()
        processes = Processes.read(self.run.services)
        rows, record = self.log.rows, self.log.newest
        step = rows[-1].step if rows else 0
        steps = int(record["steps"]) if rows and "steps" in record else None
        state = self._word(processes, step, steps)
        is_running = processes is not None and processes.is_alive
        api = self._ask_run_api(processes if is_running else None, now)
        eta = self._eta_s(step, steps) if is_running and state == "training" else None
        return {
            "run": self.id,
            "state": state,
            "step": step,
            "steps": steps or self.settings().get("steps"),
            "services": self._services(processes, api),
            "times": self._time_of_steps(),
            "queue": api["queue"],
            "staleness": record.get("staleness/mean"),
            "tokens_per_s": record.get("throughput/tokens_per_s"),
            "training_speed": speed_text(record),
            "eta_s": eta,
            "eta_text": None if eta is None else f"about {duration(eta)} left",
            "warnings": [asdict(one) for one in self._logs.warnings.values()]
            + self._own_warnings(now)
            + _error_of(processes),
            "alerts": api["alerts"],
            "newest_rollouts": max(self.steps_with_rollouts(), default=None),
            "untrained": {
                kind: at.stat().st_mtime for kind, at in self.run.untrained_rollouts.items()
            },
            "last_evaluation": self._evaluated[1],
        }

    def _word(self, processes: Processes | None, step: int, steps: int | None) -> str:
        if processes is not None:
            if processes.end:
                return processes.end.state
            if processes.is_alive:
                return self._while_alive(processes, step)
            return "killed"
        return "completed" if steps and step >= steps else "not running, or not started here"

    def _while_alive(self, processes: Processes, step: int) -> str:
        """Before the first step what the trainer does. It may still load what it resumes from."""
        stage = stage_of(self.run)
        if stage is not None and not is_stage_of(stage, processes.services):
            return "starting"
        return "training" if step else STAGES.get(stage.stage, stage.stage) if stage else "starting"

    def _services(
        self, processes: Processes | None, api: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        facts = ServiceFacts(
            pids={} if processes is None else processes.services,
            is_running=processes is not None and processes.is_alive,
            began=0.0 if processes is None else processes.runner.created,
            left_over=frozenset() if processes is None else processes.left_over,
            memory=self._newest_memory(),
            trainer=stage_of(self.run),
            environments=self._logs.sampling,
            servers=api["servers"],
            api_away_since=self._api_away_since,
        )
        return facts.shown()

    def _newest_memory(self) -> Mapping[str, int]:
        lines = [*self._memory_file.read()]
        with suppress(ValidationError, IndexError):  # a line that a full disk has cut
            self._memory = MemorySample.model_validate_json(lines[-1]).bytes
        return self._memory

    def _ask_run_api(self, processes: Processes | None, now: float) -> dict[str, Any]:
        found: dict[str, Any] = {"queue": None, "servers": [], "alerts": []}
        url = processes.run_api_url if processes else None
        if url is None:
            self._api_away_since = None
            return found
        if self._api is None or self._api[0] != url:
            reader = MeasuresReader(self.run, url, self._token, self._clock)
            self._api = url, reader
        status, measures = self._probe.get_json(f"{url}/status"), self._api[1].read()
        found["alerts"] = [
            {
                "name": one.alert.name,
                "text": one.text,
                "advice": one.alert.advice,
                "since": one.since,
            }
            for one in self._alerts.look(measures, now)
        ]
        if status is None:
            self._api_away_since = self._api_away_since or now
            return found
        self._api_away_since = None
        groups = self._logs.groups
        queue = {
            "groups_in_the_queue": status["queue_size"],
            "age_of_the_oldest_in_s": measures.oldest_queued_group_s,
            "refused_groups": status.get("refused_groups"),
            "submitted_groups": groups[SENT],
            "groups_dropped_for_equal_scores": groups[DROPPED],
        }
        found["queue"] = {name: value for name, value in queue.items() if value is not None}
        found["servers"] = self._probe.get_json(f"{url}/servers") or []
        return found

    def _own_warnings(self, now: float) -> list[dict[str, Any]]:
        """What this page itself noticed."""
        found = []
        if count := len(self.log.broken_lines):
            found.append(f"{count} lines of {self.run.metrics} are no step records")
        if self._api_away_since is not None:
            since = time.strftime("%H:%M:%S", time.localtime(self._api_away_since))
            found.append(f"run-api does not answer since {since}; the queue is not known")
        self._noticed = {text: self._noticed.get(text, now) for text in found}
        return [
            asdict(Warned(since, "grpo-watch", "warning", "", text))
            for text, since in self._noticed.items()
        ]

    def _time_of_steps(self) -> dict[str, dict[str, float]]:
        rows = self.log.rows[-ETA_STEPS:]
        if not rows:
            return {}
        columns = zip(*(row.parts for row in rows), strict=True)
        return {
            name: {"newest": seconds[-1], "median": median(seconds)}
            for name, seconds in zip(PARTS, columns, strict=True)
        }

    def _eta_s(self, step: int, steps: int | None) -> float | None:
        rows = self.log.rows[-ETA_STEPS - 1 :]
        if steps is None or len(rows) < 2 or step >= steps:
            return None
        saved = [row.parts[-1] for row in rows[1:]]
        took = [b.time - a.time - save for (a, b), save in zip(pairwise(rows), saved, strict=True)]
        return (median(took) + fmean(saved)) * (steps - step)


def _error_of(processes: Processes | None) -> list[dict[str, Any]]:
    """The error that ended the run."""
    if processes is None or processes.end is None or not processes.end.text:
        return []
    event, _, text = processes.end.text.partition(": ")
    return [asdict(Warned(processes.end.time, LAUNCHER, "error", event, printable(text)))]


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 20 min`"""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
