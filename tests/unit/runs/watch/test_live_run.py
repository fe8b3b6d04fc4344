"""What is told of a run: services and stages, queue, warnings, and how long it takes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from grpo_core.alerts import ALERTS
from grpo_runs.process.records import ProcessRecords
from grpo_runs.process.stack import StopRequested, warn
from grpo_runs.run_directory import RunDirectory
from grpo_runs.watch.api import curves_of
from grpo_runs.watch.live_run import LiveRun, duration
from grpo_runs.watch.logs import FIRST_READ_BYTES
from grpo_runs.watch.news import ServiceNews
from tests.unit.runs.records import metrics_line, metrics_object, take_steps
from tests.unit.runs.stand_ins import Shown
from tests.unit.runs.test_measures import RUNNING, run_api

IN_THE_FUTURE = "2100-01-01T10:00:00"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "mine")
    for directory in (run.logs, run.checkpoints):
        directory.mkdir(parents=True)
    return run


@pytest.fixture
def live(run: RunDirectory) -> LiveRun:
    return LiveRun("mine", run, clock=Clock())


def log(run: RunDirectory, service: str, *lines: str) -> None:
    with (run.logs / f"{service}.log").open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def stages(live: LiveRun) -> dict[str, str]:
    return {one["name"]: one["stage"] for one in live.state()["services"]}


def test_services_and_their_stages(run: RunDirectory, live: LiveRun) -> None:
    processes = ProcessRecords(run)
    own = processes._content["runner"]["pid"]  # a process that runs
    names = ("redis", "vllm-server", "trainer", "environment")
    processes.watch(dict.fromkeys(names, own))
    assert live.state()["state"] == "starting"
    assert stages(live) == {
        "redis": "running",
        "vllm-server": "starting",
        "trainer": "starting",
        "environment": "starting",
    }
    stage = run.checkpoints / "stage.json"
    stage.write_text(json.dumps({"stage": "sync", "since": 990.5, "pid": own}))
    log(run, "environment", f"{IN_THE_FUTURE} [info     ] groups.counted  groups_in_progress=3")
    take_steps(run, 1)
    state = live.state()
    assert state["state"] == "training"
    trainer, environment = state["services"][2:]
    assert (trainer["stage"], trainer["since"]) == ("publishing", 990.5)
    assert environment["stage"] == "sampling"
    assert environment["detail"] == "3 groups in progress"
    assert environment["memory_bytes"] > 0
    few = "4 of 8 groups for this batch, 204 dropped; of the newest, 98 % have equal scores"
    told = f"for_batch={few!r} groups_in_progress=3"
    log(run, "environment", f"{IN_THE_FUTURE} [info     ] groups.counted  {told}")
    environment = live.state()["services"][3]
    assert environment["detail"] == f"3 groups in progress; {few}"
    counted = "groups.counted  groups_in_progress=0 evaluated=12/64"
    log(run, "environment", f"{IN_THE_FUTURE} [info     ] {counted}")
    environment = live.state()["services"][3]
    assert (environment["stage"], environment["detail"]) == ("evaluating", "12 of 64 items")


def test_a_run_whose_groups_are_dropped_before_its_first_step(run: RunDirectory) -> None:
    live = LiveRun("mine", run, "t", clock=Clock())
    run.config.write_text("optim: {steps: 12}")
    processes = ProcessRecords(run)
    own = processes._content["runner"]["pid"]
    processes.watch({"trainer": own, "environment": own})
    assert live.state()["state"] == "starting"
    (run.checkpoints / "stage.json").write_text(
        json.dumps({"stage": "data_fetch", "since": 990.5, "pid": own})
    )
    counted = "groups.counted  groups_in_progress=8 groups_sent=4 dropped_share=0.98"
    failures = "failures={'equal_scores': 204} for_batch='4 of 8 groups'"
    log(run, "environment", f"{IN_THE_FUTURE} [info     ] {counted} {failures}")
    with run_api() as (url, api):
        api.run([], **RUNNING | {"step": 0})
        processes.found_run_api(url)
        state = live.state()
    assert (state["state"], state["step"], state["steps"]) == ("waiting for data", 0, 12)
    assert live.listed() == {"state": "waiting for data", "step": 0, "steps": 12}
    assert state["queue"]["submitted_groups"] == 4
    assert state["queue"]["groups_dropped_for_equal_scores"] == 204
    assert [(one["name"], one["text"]) for one in state["alerts"]] == [
        ("groups-dropped", "4 of 8 groups.")
    ]


def test_a_resumed_run_that_starts(run: RunDirectory, live: LiveRun) -> None:
    """Stage, log and steps are those of the run before."""
    (run.checkpoints / "stage.json").write_text('{"stage": "sync", "since": 990.5, "pid": 1}')
    log(run, "environment", "2026-01-01T10:00:00 [info     ] groups.counted  groups_in_progress=3")
    take_steps(run, 1, 2, 3)
    processes = ProcessRecords(run)
    assert stages(live) == {}
    own = processes._content["runner"]["pid"]
    processes.watch({"trainer": own, "environment": own})
    assert (live.state()["state"], live.state()["eta_s"]) == ("starting", None)
    assert stages(live) == {"trainer": "starting", "environment": "starting"}


@pytest.mark.parametrize("state", ["completed", "failed", "stopped"])
def test_how_a_run_ended(run: RunDirectory, live: LiveRun, state: str) -> None:
    processes = ProcessRecords(run)
    processes.watch({"model": 1, "trainer": 1})  # the first one is no service
    errors = {"failed": RuntimeError("no disk"), "stopped": StopRequested(signal.SIGTERM)}
    try:
        with processes.of_the_end():
            if state in errors:
                raise errors[state]
    except (RuntimeError, StopRequested):
        pass
    assert live.state()["state"] == state
    assert stages(live) == {"trainer": "ended"}
    told = [(one["level"], one["event"], one["text"]) for one in live.state()["warnings"]]
    assert told == ([("error", "RuntimeError", "no disk")] if state == "failed" else [])
    assert "_probe" not in vars(live), "run-api of a run that has ended needs no connections"


def test_a_run_whose_command_was_killed(run: RunDirectory, live: LiveRun) -> None:
    content = {"runner": {"pid": 1, "created": 0.0}, "run_api_url": None, "services": {}}
    run.services.write_text(json.dumps(content | {"end": None}))
    assert live.state()["state"] == "killed"


def test_services_that_outlive_a_killed_command(run: RunDirectory, live: LiveRun) -> None:
    """Not every service has ended, so the run cannot be resumed yet."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as trainer:
        runner = {"pid": 1, "created": psutil.Process(trainer.pid).create_time() - 1}
        services = {"trainer": trainer.pid, "redis": os.getpid()}  # an id that was given again
        content = {"runner": runner, "run_api_url": None, "services": services, "end": None}
        run.services.write_text(json.dumps(content))
        assert stages(live) == {"trainer": "still running", "redis": "ended"}
        trainer.kill()
        trainer.wait()
        assert stages(live) == {"trainer": "ended", "redis": "ended"}


def test_a_run_that_nobody_looks_at_is_not_read(run: RunDirectory, live: LiveRun) -> None:
    assert live.listed() == {"state": live.listed()["state"], "step": 0, "steps": None}
    ProcessRecords(run)
    take_steps(run, *range(1, 40))
    assert live.listed() == {"state": "training", "step": 39, "steps": 40}
    assert live.log.rows == []
    run.metrics.write_text("broken\n")
    assert live.listed()["step"] == 0


def test_curves_do_not_wait_for_run_api(run: RunDirectory, live: LiveRun) -> None:
    take_steps(run, 1)
    with live._lock:  # held while run-api is asked
        assert curves_of(live, "step", 10)[0]["points"] == [(1, 0.1, 1)]


def test_a_save_path_of_a_trainer_elsewhere(run: RunDirectory, live: LiveRun) -> None:
    take_steps(run, 1, 2)
    state = live.state()
    assert (state["step"], state["steps"], state["services"]) == (2, 40, [])
    assert (state["eta_s"], state["queue"]) == (None, None)


def test_times_and_the_rest_of_the_run(run: RunDirectory, live: LiveRun) -> None:
    ProcessRecords(run)
    take_steps(run, *range(1, 11))
    state, record = live.state(), metrics_object(10)
    assert state["eta_s"] == pytest.approx(30 * record["train/step_time"])
    assert state["times"]["train"] == {
        "newest": record["train/compute_time"],
        "median": record["train/compute_time"],
    }
    assert [duration(s) for s in (45, 720, 12000)] == ["45 s", "12 min", "3 h 20 min"]


def test_the_rest_of_a_run_includes_saving(run: RunDirectory, live: LiveRun) -> None:
    """The time of a step does not."""
    ProcessRecords(run)
    with run.metrics.open("a") as file:
        for step in range(1, 12):  # steps 5 and 10 are followed by a checkpoint
            saved = {"train/save_time": 9.0} if step in (6, 11) else {}
            file.write(metrics_line(step, **saved))
    step_s = metrics_object(1)["train/step_time"]
    assert live.state()["eta_s"] == pytest.approx(29 * (step_s + 9 * 2 / 10))
    assert live.log.rows[-1].time == pytest.approx(11 * step_s + 2 * 9)


def test_warnings_and_errors_of_all_services(run: RunDirectory, live: LiveRun) -> None:
    log(
        run,
        "trainer",
        "2026-01-01T10:00:02 [error    ] RolloutMismatch   reason=the server \x1b[31m lies",
        "2026-01-01T10:00:01 [info     ] step.finished     step=1",
        "a line of a library",
    )
    log(run, "run-api", "2026-01-01T10:00:01 [warning  ] groups.refused    count=3")
    warnings = live.state()["warnings"]
    told = [(one["service"], one["level"], one["event"], one["text"]) for one in warnings]
    assert told == [
        ("run-api", "warning", "groups.refused", "count=3"),
        ("trainer", "error", "RolloutMismatch", "reason=the server \\x1b[31m lies"),
    ]
    assert warnings[1]["time"] - warnings[0]["time"] == 1


def test_warnings_of_one_name_are_counted(run: RunDirectory, live: LiveRun) -> None:
    for second, text in enumerate(("check=stale a=1", "check=sign a=2", "check=stale a=3")):
        at = f"2026-01-01T10:00:0{second}"
        log(run, "trainer", f"{at} [warning  ] check.failed    {text} service=trainer")
    told = [(one["event"], one["text"], one["count"]) for one in live.state()["warnings"]]
    assert told == [
        ("check.failed", "check=stale a=3", 2),
        ("check.failed", "check=sign a=2", 1),
    ]
    told_of = "healthy='below 1' metric"
    for metric in ("a/b", "c/d"):
        log(run, "trainer", f"{at} [warning  ] metric.out_of_range    {told_of}={metric}")
    live.state()
    names = ("check.failed stale", "check.failed sign", "metric.out_of_range a/b")
    assert [*live._logs.warnings][:3] == [f"trainer {name}" for name in names]


def test_warnings_of_the_launcher_are_among_them(run: RunDirectory, live: LiveRun) -> None:
    screen = Shown()
    for name in ("server-0", "server-1"):
        warn(screen, run.logs, "ServiceEnded", f"{name} ended with SIGKILL")
    assert screen.err.splitlines()[1] == "warning: server-1 ended with SIGKILL"
    (told,) = live.state()["warnings"]
    assert (told["service"], told["event"]) == ("grpo-run", "ServiceEnded")
    assert (told["level"], told["count"]) == ("warning", 2)
    assert told["text"] == "server-1 ended with SIGKILL"
    news = ServiceNews(screen, run.logs, run)
    warn(screen, run.logs, "ServiceEnded", "server-2 ended with SIGKILL")
    news.look()
    assert screen.err.count("server-2") == 1


def test_text_of_a_model_names_no_warning(run: RunDirectory, live: LiveRun) -> None:
    text = """completions='score 0: "check=stale equal_scores: ... dropped_share=0.0"'"""
    log(run, "environment", f"2026-01-01T10:00:01 [warning  ] rewards.all_equal    {text}")
    live.state()
    assert [*live._logs.warnings] == ["environment rewards.all_equal"]


def test_a_long_log_is_read_from_its_end(run: RunDirectory, live: LiveRun) -> None:
    filler = ["2026-01-01T10:00:01 [warning  ] loss.sign    a=1"] * (FIRST_READ_BYTES // 40)
    log(run, "trainer", *filler, "2026-01-01T10:00:02 [warning  ] loss.sign    a=2")
    [warning] = live.state()["warnings"]
    assert warning["text"] == "a=2"
    assert 1000 < warning["count"] < len(filler)


def test_run_api_that_does_not_answer_is_told_once(run: RunDirectory, live: LiveRun) -> None:
    processes = ProcessRecords(run)
    with run_api() as (url, _):
        pass
    processes.found_run_api(url)
    first, again = live.state()["warnings"], live.state()["warnings"]
    assert first == again
    assert first[0]["text"].startswith("run-api does not answer since ")
    assert live.state()["queue"] is None


def test_a_broken_metrics_file_is_told(run: RunDirectory, live: LiveRun) -> None:
    run.metrics.write_text("no record\n")
    assert "1 lines of" in live.state()["warnings"][0]["text"]


def test_alerts_that_fire(run: RunDirectory) -> None:
    now = iter(range(1000, 10_000_000, 3600))  # an hour passes from look to look
    live = LiveRun("mine", run, clock=lambda: float(next(now)))
    processes = ProcessRecords(run)
    processes.found_run_api("http://127.0.0.1:9")
    processes.watch({"trainer": 7})
    (run.checkpoints / "stage.json").write_text('{"stage": "sync", "since": 990.5, "pid": 7}')
    live.state()
    live.state()
    alerts = live.state()["alerts"]
    assert [one["name"] for one in alerts] == ["no-training-step", "run-api-gone"]
    advice = next(one.advice for one in ALERTS if one.name == "no-training-step")
    assert alerts[0]["advice"] == advice
