"""Stops a real run, resumes it from its checkpoint, and prolongs it after its end."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest

from grpo_runs.report.steps import pool_curves
from grpo_runs.run_directory import RunDirectory
from grpo_runs.watch.live_run import LiveRun
from grpo_runs.watch.services import STAGES
from tests.e2e.demo_run import DEADLINE_S, NOISE, run_demo, signalled_after

pytestmark = [pytest.mark.full, pytest.mark.timeout(3 * DEADLINE_S)]


def is_told_while_it_trains(live: LiveRun) -> None:
    state = live.state()
    assert (state["state"], state["steps"], state["warnings"]) == ("training", 500, [])
    assert state["queue"]["refused_groups"] == 0
    assert state["eta_s"] > 0
    found = {one["name"]: one for one in state["services"]}
    assert found["trainer"]["stage"] in STAGES.values()
    assert found["vllm-server"]["detail"].startswith("weights of step ")
    assert all(found[name]["memory_bytes"] > 0 for name in ("trainer", "vllm-server", "run-api"))


@pytest.mark.usefixtures("tiny_model")
@pytest.mark.parametrize("mode", ["shared_vllm", "lora_only", "none"])
def test_a_stopped_run_goes_on_with_its_options_and_can_be_prolonged(
    tmp_path: Path, mode: str
) -> None:
    run = RunDirectory(tmp_path / "run")
    flags = ("--mode", mode, "--vllm-restart-interval", "2", "--trainer.state-interval", "2")
    live = LiveRun("run", run)
    own = ("--steps", "500", "--group-size", "4", "--curriculum", "learnable")
    look = partial(is_told_while_it_trains, live)
    signalled_after(4, run, signal.SIGTERM, *flags, *own, look=look)
    assert live.state()["state"] == "stopped"
    resumed = run_demo(run.path, "--steps", "8", option="--resume")
    assert f"mode {mode}: " in resumed.output
    assert "8/8 " in resumed.output
    assert live.state()["state"] == "completed"
    assert [row.step for row in live.log.rows] == [*range(1, 9)]
    prolonged = run_demo(run.path, "--steps", "10", option="--resume")
    records = prolonged.records
    assert [record["step"] for record in records] == list(range(1, 11))
    assert "steps 9 to 10" in prolonged.output
    fresh = [
        record["alignment/diff_max"]
        for record in records
        if record.get("staleness/max") == 0 and record["staleness/other_epoch_fraction"] == 0
    ]
    assert fresh
    assert all(difference < NOISE for difference in fresh)
    assert "group-size: 4" in run.config.read_text()
    assert "curriculum.restored" in (run.logs / "environment.log").read_text()
    assert pool_curves(run.curricula)["curriculum/arithmetic/easy"][-1][0] == 10
    assert run.reward_plot.stat().st_size > 5_000
