"""A run on two nodes, each a network namespace. They share no directory, and no name of theirs
leads to the other one. The second node is killed, and joins again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.e2e.demo_run import DEADLINE_S
from tests.support.pages import ROOT
from tests.support.wait import wait_for

STEPS, LOST_AFTER, SAVED_EVERY = 12, 5, 2
HEAD, OTHER = "10.231.77.1", "10.231.77.2"
MEETING = ("--nodes", "2", "--rendezvous", f"{HEAD}:29500")

pytestmark = [pytest.mark.full, pytest.mark.timeout(DEADLINE_S + 60)]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[str, str]]:
    """The names of two network namespaces that are connected."""
    names = f"grpo-a-{os.getpid()}", f"grpo-b-{os.getpid()}"
    made: list[str] = []
    try:
        for name in names:
            try:
                _ip("netns", "add", name)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}")
            made.append(name)
        ends = [("veth", "netns", name) for name in names]
        _ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
        for name, address in zip(names, (HEAD, OTHER), strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "veth")
            for device in ("lo", "veth"):
                _ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in made:
            end_all(name)
            _ip("netns", "delete", name)


def end_all(node: str) -> None:
    """Kill every process of a node."""
    found = subprocess.run(["ip", "netns", "pids", node], capture_output=True, text=True)
    for pid in map(int, found.stdout.split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def start(node: str, log: Path, module: str, *words: str) -> subprocess.Popen[bytes]:
    variables = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    log.parent.mkdir(exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            ["ip", "netns", "exec", node, sys.executable, "-m", module, *words],
            cwd=log.parent,
            env=os.environ | variables,
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
