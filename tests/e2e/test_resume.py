"""Stops a real run, resumes it from its checkpoint, and prolongs it after its end."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_runs.run_directory import RunDirectory
from tests.e2e.demo_run import DEADLINE_S, NOISE, run_demo
from tests.support.wait import wait_for

pytestmark = [pytest.mark.full, pytest.mark.timeout(3 * DEADLINE_S)]


def stop_after(steps: int, run: RunDirectory, *flags: str) -> None:
    """Start the demo and stop it with SIGTERM once it has taken some steps."""
    command = [sys.executable, "-m", "grpo_runs", "--run-dir", str(run.path), *flags]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as demo:
        wait_for(lambda: (run.newest_checkpoint_step() or 0) >= steps, deadline_s=DEADLINE_S)
        demo.send_signal(signal.SIGTERM)
    assert demo.returncode == 128 + signal.SIGTERM


@pytest.mark.usefixtures("tiny_model")
@pytest.mark.parametrize("mode", ["shared_vllm", "lora_only", "none"])
def test_a_stopped_run_goes_on_with_its_options_and_can_be_prolonged(
    tmp_path: Path, mode: str
) -> None:
    run = RunDirectory(tmp_path / "run")
    flags = ("--mode", mode, "--vllm-restart-interval", "2", "--trainer.state-interval", "2")
    stop_after(4, run, *flags, "--steps", "500", "--group-size", "4")
    resumed = run_demo(run.path, "--steps", "8", option="--resume")
    assert f"mode {mode}: " in resumed.output
    assert "8/8 " in resumed.output
    prolonged = run_demo(run.path, "--steps", "10", option="--resume")
    records = prolonged.records
    assert [record["step"] for record in records] == list(range(1, 11))
    assert "steps 9 to 10" in prolonged.output
    fresh = [record["alignment/diff_max"] for record in records if record.get("staleness/max") == 0]
    assert all(difference < NOISE for difference in fresh)
    assert "group-size: 4" in run.config.read_text()
    assert run.reward_plot.stat().st_size > 5_000
