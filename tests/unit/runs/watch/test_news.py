"""What a terminal shows of the services that a command waits for."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from grpo_runs.run_directory import RunDirectory
from grpo_runs.watch.news import LOOK_EVERY_POLLS, ServiceNews
from tests.unit.runs.stand_ins import Shown
from tests.unit.runs.watch.test_live_run import IN_THE_FUTURE, log

WARNED = "2026-01-01T10:00:00 [warning  ] rewards.all_equal    score=0.0 service=environment"


def test_the_first_warning_of_each_name_is_shown(tmp_path: Path) -> None:
    run, screen = RunDirectory(tmp_path), Shown()
    run.logs.mkdir()
    log(run, "environment", WARNED)
    news = ServiceNews(screen, run.logs, run, shown="trainer")
    news.watch({})
    assert screen.err == "", "it is of the run before a resume"
    log(run, "environment", WARNED, WARNED)
    log(run, "trainer", "2026-01-01T10:00:00 [warning  ] loss.sign    hint=shown")
    log(run, "vllm-server", "2026-01-01T10:00:00 [error    ] EngineDied    reason=told at the end")
    for _ in range(LOOK_EVERY_POLLS - 1):
        news.watch({})
    assert screen.err == "", "it looks once a second"
    for _ in range(2 * LOOK_EVERY_POLLS):
        news.watch({})
        log(run, "environment", WARNED)
    assert screen.err == "warning: environment rewards.all_equal: score=0.0\n"


def test_each_kind_of_a_reward_s_exceptions_is_shown_and_repeated(tmp_path: Path) -> None:
    run, screen = RunDirectory(tmp_path), Shown()
    run.logs.mkdir()
    news = ServiceNews(screen, run.logs, run)
    failed = "2026-01-01T10:00:00 [warning  ] reward.failed    at='my.py:3: f()' error="
    told = ["\"KeyError: 'x'\" row=1", "'ValueError: no' row=2", "\"KeyError: 'y'\" row=3"]
    log(run, "environment", *(failed + text for text in told))
    named = [f"warning: environment reward.failed {kind}: " for kind in ("KeyError", "ValueError")]
    news.look()
    assert [screen.err.count(name) for name in named] == [1, 1]
    news.repeat()
    assert [screen.err.count(name) for name in named] == [2, 2]


def test_what_trainer_and_environments_do_is_told(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for directory in (run.logs, run.checkpoints):
        directory.mkdir()
    news = ServiceNews(Shown(), run.logs, run)
    pids = dict.fromkeys(("run-api", "trainer", "environment-sums"), os.getpid())
    news.watch(pids)
    assert news.waited_for() == "trainer starting; environment-sums starting"
    stage = {"stage": "data_fetch", "since": time.time() - 600, "pid": os.getpid()}
    (run.checkpoints / "stage.json").write_text(json.dumps(stage))
    counted = "groups.counted  groups_in_progress=2"
    log(run, "environment-sums", f"{IN_THE_FUTURE} [info     ] {counted}")
    for _ in range(LOOK_EVERY_POLLS):
        news.watch(pids)
    told = "trainer waiting for data; environment-sums sampling 2 groups in progress"
    assert news.waited_for() == told
