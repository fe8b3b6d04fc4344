"""`grpo-demo --servers`: several servers serve exact weights, and one of them is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e.demo_run import DEADLINE_S, NOISE
from tests.support.wait import wait_for

STEPS = 16
SERVERS = 3
PUBLISHES_EVERY = {"none": 1, "lora_only": 1, "lora_restart": 4}

pytestmark = [pytest.mark.full, pytest.mark.timeout(DEADLINE_S + 60)]


@pytest.mark.parametrize("mode", PUBLISHES_EVERY)
def test_a_run_with_several_servers_goes_on_without_one(
    mode: str,
    tmp_path: Path,
    tiny_model: Path,  # noqa: ARG001
) -> None:
    run = tmp_path / "run"
    words = ["--mode", mode, "--servers", str(SERVERS), "--steps", str(STEPS)]
    if mode == "lora_restart":
        words += ["--vllm-restart-interval", str(PUBLISHES_EVERY[mode])]
    with (tmp_path / "shown").open("w") as shown:
        started = subprocess.Popen(
            [sys.executable, "-m", "grpo_runs", *words, "--run-dir", str(run)],
            stdout=shown,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_for(lambda: len(records(run)) >= 5, deadline_s=DEADLINE_S)
            os.kill(supervisor(started.pid, "server-1"), signal.SIGKILL)
            assert started.wait(DEADLINE_S) == 0, (tmp_path / "shown").read_text()
        finally:
            started.terminate()
            started.wait(DEADLINE_S)
    taken = records(run)
    assert [record["step"] for record in taken] == list(range(1, STEPS + 1))
    probed = [r["alignment/probe_max"] for r in taken if "alignment/probe_max" in r]
    assert len(probed) == STEPS // PUBLISHES_EVERY[mode]
    assert max(probed) < NOISE
    fresh = [r["alignment/diff_max"] for r in taken if r["staleness/max"] == 0]
    assert all(difference < NOISE for difference in fresh)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["ended_servers"] == {"server-1": "SIGKILL"}
    assert [server["name"] for server in summary["servers"]] == ["server-0", "server-2"]
    assert {server["step"] for server in summary["servers"]} == {STEPS}
    assert sum(server["dropped_requests"] for server in summary["servers"]) == 0


def records(run: Path) -> list[dict[str, float]]:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def supervisor(launcher: int, name: str) -> int:
    """Process id of the server of this name."""
    (found,) = (
        child.pid
        for child in psutil.Process(launcher).children()
        if child.status() != psutil.STATUS_ZOMBIE
        and child.cmdline()[1:3] == ["-m", "grpo_vllm"]
        and name in child.cmdline()
    )
    return found
