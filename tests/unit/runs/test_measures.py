"""What alerts look at, from run-api's real metrics and a metrics file that grows."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from grpo_api.metrics import Metrics, RunScrape
from grpo_api.store.run import RunStats
from grpo_api.store.servers import ServerCounts
from grpo_core.alerts import FIRST_STEP_S
from grpo_runs.measures import MeasuresReader
from grpo_runs.process.ports import free_port
from grpo_runs.process.records import ProcessRecords
from grpo_runs.run_directory import RunDirectory
from grpo_runs.watch.logs import ServiceLogs

STATS = RunStats._make([0] * len(RunStats._fields))
RUNNING = {"step": 3, "num_steps": 10, "environments_alive": 2}


class RunApi:
    """Its /metrics. `shows`: None if Redis is away"""

    def __init__(self) -> None:
        self.shows: RunScrape | None = None

    def run(self, servers: list[ServerCounts] | None = None, **counts: Any) -> None:
        self.shows = RunScrape(STATS._replace(**counts), servers, append_only_file_bytes=250)


@contextmanager
def run_api() -> Iterator[tuple[str, RunApi]]:
    shown, metrics = RunApi(), Metrics(redis_disk_bytes=1000)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = self.headers["authorization"] == "Bearer t"
            self.send_response(200 if allowed else 401)
            self.end_headers()
            answers = {"/status": b'{"queue_size": 3, "refused_groups": 0}', "/servers": b"[]"}
            found = answers.get(self.path) or metrics.exposition(shown.shows, "").body
            self.wfile.write(bytes(found))

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", shown
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_measures_of_run_api(tmp_path: Path) -> None:
    two = [ServerCounts("a", "serving", 5, 2, 1), ServerCounts("b", "serving", 5, 0, 2)]
    with run_api() as (url, api):
        reader = MeasuresReader(RunDirectory(tmp_path), url, "t")
        assert reader.read().redis_answers is False
        api.run(two, **RUNNING, refused_groups=4, oldest_queued_group_age_seconds=7.5)
        found = reader.read()
        assert (found.redis_answers, found.redis_disk_share) == (True, 0.25)
        assert (found.environments_alive, found.servers_gone, found.engine_crashes) == (2, 0, 0)
        assert (found.refused_groups, found.oldest_queued_group_s) == (4, 7.5)
        api.run(two[:1], **RUNNING)
        assert reader.read().servers_gone == 0, "it was stopped"
        api.run([two[0], two[1]._replace(state="failed")], **RUNNING)
        assert reader.read().servers_gone == 1
        api.run(two[:1], **RUNNING | {"step": 10})  # the last batch is handed out
        found = reader.read()
        assert (found.environments_alive, found.servers_gone) == (None, None)
        assert found.oldest_queued_group_s is None
        other = MeasuresReader(RunDirectory(tmp_path), url, "wrong")
        found = other.read()
        assert (found.run_api_answers, found.redis_answers) == (False, None)
    assert reader.read().run_api_answers is None, "nobody needs it after the last batch"


def test_servers_that_leave_and_come_back(tmp_path: Path) -> None:
    """Their crashes are those of each, and one that was lost is missed for an hour."""
    now = [0.0]

    def counts(**crashes: int) -> list[ServerCounts]:
        """The state of one without a report is unknown."""
        return [
            ServerCounts(name, "serving" if name in crashes else "", 5, 0, crashes.get(name, 0))
            for name in ("a", "b")
        ]

    with run_api() as (url, api):
        reader = MeasuresReader(RunDirectory(tmp_path), url, "t", clock=lambda: now[0])
        looks = (
            (0, counts(a=1, b=2), 0, 0),
            (10, counts(b=2), 1, 0),
            (20, counts(a=1, b=2), 0, 0),
            (30, counts(a=2, b=2), 0, 1),
            (40, counts(a=2, b=0), 0, 1),  # b was started again
            (50, counts(b=1), 1, 2),
            (3639, counts(b=1), 1, 2),
            (3640, counts(b=1), 0, 2),
        )
        for at, servers, gone, crashes in looks:
            now[0] = at
            api.run(servers, **RUNNING)
            found = reader.read()
            assert (found.servers_gone, found.engine_crashes) == (gone, crashes), at


def test_steps_are_waited_for_from_the_first_one_to_the_last_batch(tmp_path: Path) -> None:
    run, now = RunDirectory(tmp_path), [0.0]
    processes = ProcessRecords(run)
    processes.watch({"trainer": 7})
    run.checkpoints.mkdir()
    with run_api() as (url, api):
        reader = MeasuresReader(run, url, "t", clock=lambda: now[0])

        def since(at: float, pid: int, **counts: Any) -> float | None:
            now[0] = at
            stage = {"stage": "data_fetch", "since": 0, "pid": pid}
            (run.checkpoints / "stage.json").write_text(json.dumps(stage))
            api.run(**counts)
            return reader.read().over_step_s

        assert since(1000, pid=6, step=0) is None  # of the trainer before a resume
        assert since(2000, pid=7, **RUNNING) == -FIRST_STEP_S
        assert since(2030, pid=7, **RUNNING) == 30 - FIRST_STEP_S
        # a run without a last batch
        assert since(2040, pid=7, step=3, num_steps=0) == 40 - FIRST_STEP_S
        api.shows = None  # Redis is away
        now[0] = 2050
        assert reader.read().over_step_s == 50 - FIRST_STEP_S
        assert since(2060, pid=7, step=10, num_steps=10) is None


def test_measures_of_the_metrics_file(tmp_path: Path) -> None:
    run, now = RunDirectory(tmp_path), [100.0]
    old = {"step": 1, "checks/failed": 5}
    run.metrics.write_text(json.dumps(old) + "\n")
    reader = MeasuresReader(run, f"http://127.0.0.1:{free_port()}", clock=lambda: now[0])
    found = reader.read()
    assert (found.over_step_s, found.failed_checks, found.staleness_mean) == (None, 0, None)
    assert found.redis_answers is None
    with run.metrics.open("a") as file:
        for step in (2, 3):
            line = {"step": step, "checks/failed": 1, "data/stale_groups": 2}
            line["train/step_time"] = 10 * step
            file.write(json.dumps(line | {"staleness/mean": step / 2}) + "\n")
        file.write('{"step": 4')  # the trainer is writing it
    found = reader.read()
    assert (found.over_step_s, found.staleness_mean) == (-30, 1.5), "the longest took 30 s"
    assert (found.failed_checks, found.stale_groups, found.unusable_groups) == (2, 4, 0)
    assert (found.disk_free_bytes or 0) > 0
    kept = run.metrics.read_text().splitlines(keepends=True)[:2]
    again = json.dumps({"step": 3, "checks/failed": 4}) + "\n"
    now[0] += 50
    run.metrics.write_text("".join(kept) + again)  # by a trainer that resumed after step 2
    found = reader.read()
    assert (found.over_step_s, found.failed_checks, reader.step) == (-30, 6, 3)


def test_the_share_of_dropped_groups_is_that_of_the_newest_report(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.logs.mkdir()
    pids = {"environment-easy": os.getpid(), "environment-hard": os.getpid()}
    with subprocess.Popen(["true"]) as ended:
        pass
    ProcessRecords(run).watch(pids | {"environment-ended": ended.pid})
    for task, year, share, left in (
        ("easy", 2100, 0.98, 4),
        ("hard", 2100, 0.5, 8),
        ("ended", 2100, 0.99, 2),
        ("before-a-resume", 2026, 0.99, 2),
    ):
        event = f"{year}-01-01T10:00:00 [info     ] groups.counted  groups_in_progress=1"
        (run.logs / f"environment-{task}.log").write_text(
            f"{event} dropped_share=0.1\n{event} dropped_share={share} groups_sent=3 "
            f"failures={{'equal_scores': 9, 'refused': 2}} for_batch='{left} of 8'\n"
        )
    found = MeasuresReader(run, "http://127.0.0.1:9").read()
    assert (found.dropped_share, found.details) == (0.98, {"dropped_share": "4 of 8."})
    logs = ServiceLogs(run.logs)
    logs.read_new()
    assert logs.groups == {"groups_sent": 12, "equal_scores": 36, "lost": 8}
