"""A run on two nodes, each a network namespace: started by hand, and by Slurm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.e2e.demo_run import DEADLINE_S
from tests.support.pages import ROOT
from tests.support.two_nodes import ADDRESSES, end_all, slurm_of, two_nodes, within
from tests.support.wait import wait_for

STEPS, LOST_AFTER, SAVED_EVERY = 12, 5, 2
MEETING = ("--nodes", "2", "--rendezvous", f"{ADDRESSES[0]}:29500")

VARIABLES = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

pytestmark = [pytest.mark.full, pytest.mark.timeout(DEADLINE_S + 60)]


def start(node: str, log: Path, module: str, *words: str) -> subprocess.Popen[bytes]:
    log.parent.mkdir(exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            within(node, sys.executable, "-m", module, *words),
            cwd=log.parent,
            env=os.environ | VARIABLES,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def steps(metrics: Path) -> list[int]:
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]


def wait_for_step(step: int, metrics: Path, logs: Sequence[Path], *running: object) -> None:
    def taken() -> list[int]:
        for one in running:
            assert isinstance(one, subprocess.Popen)
            assert one.poll() is None, "\n".join(log.read_text()[-4000:] for log in logs)
        return steps(metrics)

    wait_for(taken, lambda found: found[-1:] >= [step], DEADLINE_S)


def test_a_run_on_two_nodes_goes_on_after_one_was_killed(tmp_path: Path, tiny_model: Path) -> None:
    """They share no directory, and no name leads from one to the other."""
    run, away = tmp_path / "run", tmp_path / "away"
    logs = (tmp_path / "head.log", away / "log")
    with two_nodes() as (first, second):
        words = ("--mode", "none", "--eval-every", "0", "--no-watch", "--run-dir", str(run))
        sizes = ("--steps", str(STEPS), "--state-interval", str(SAVED_EVERY))
        head = start(first, logs[0], "grpo_runs", *words, *sizes, *MEETING)
        node = ("grpo_trainer", "--model", str(tiny_model), *MEETING)
        other = start(second, logs[1], *node)
        wait_for_step(LOST_AFTER, run / "metrics.jsonl", logs, head, other)
        end_all(second)
        other.wait()
        again = start(second, logs[1], *node)
        assert head.wait(DEADLINE_S) == 0, logs[0].read_text()
        assert again.wait(DEADLINE_S) == 0, logs[1].read_text()
    assert steps(run / "metrics.jsonl") == [*range(1, STEPS + 1)]
    assert json.loads((run / "summary.json").read_text())["summary"]["steps"] == STEPS
    assert "ranks.restarted" in (run / "logs" / "trainer.log").read_text()
    assert not [*away.rglob("*.safetensors")], "rank 0 alone writes"


def test_slurm_runs_it_on_two_nodes_and_a_killed_rank_starts_again(
    tmp_path: Path, tiny_model: Path
) -> None:
    work = tmp_path / "work"
    (work / "logs").mkdir(parents=True)
    shutil.copy(ROOT / "online.sh", work)
    words = ("--task", "arithmetic", "--mode", "none", "--eval-every", "0")
    sizes = ("--steps", str(STEPS), "--state-interval", str(SAVED_EVERY))
    metrics, log = work / "runs" / "slurm-1" / "metrics.jsonl", work / "logs" / "slurm_1.out"
    with two_nodes() as nodes, slurm_of(nodes, tmp_path / "slurm") as config:
        own = {"SLURM_CONF": str(config), "PYTHON": sys.executable}
        job = subprocess.Popen(
            within(nodes[0], "sbatch", "--wait", "online.sh", str(tiny_model), *words, *sizes),
            cwd=work,
            env=os.environ | VARIABLES | own,
        )
        wait_for_step(LOST_AFTER, metrics, [log], job)
        _rank_of(nodes[1]).kill()
        assert job.wait(DEADLINE_S) == 0, log.read_text()
    assert steps(metrics) == [*range(1, STEPS + 1)]
    assert "ranks.restarted" in log.read_text(), "the second node has no other log"


def _rank_of(node: str) -> psutil.Process:
    found = subprocess.run(["ip", "netns", "pids", node], capture_output=True, text=True)
    ranks = [psutil.Process(int(pid)) for pid in found.stdout.split()]
    (rank,) = [one for one in ranks if one.environ().get("RANK") == "1"]
    return rank
