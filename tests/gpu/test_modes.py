"""Every mode trains the tiny model on the GPU, with compilation and CUDA graphs on.

The tests in tests/inference also run on a GPU and check what else each mode promises.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from grpo_local.modes import MODES, Mode
from tests.e2e.left_over import processes_that_log_below
from tests.fixtures.inference import FLOAT32_NOISE

STEPS = 6
RESTART_EVERY_STEPS = 3
DEADLINE_S = 200
BFLOAT16_NOISE = 0.05
"""Bound on the mean |difference| of logprobs."""


@dataclass(frozen=True)
class Run:
    mode: Mode
    directory: Path

    @property
    def records(self) -> list[dict[str, float]]:
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @property
    def server(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.directory / "summary.json").read_text())
        server: dict[str, Any] = summary["server"]
        return server

    def log(self, service: str) -> str:
        return (self.directory / "logs" / f"{service}.log").read_text()


@pytest.fixture(scope="module", params=sorted(MODES))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp(request.param) / "run"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "grpo_local", "--mode", request.param),
            *("--steps", str(STEPS), "--vllm-restart-interval", str(RESTART_EVERY_STEPS)),
            *("--run-dir", str(directory), "--trainer.optimizer", "adamw"),
            # vLLM's LoRA kernels for GPUs do not take float32.
            *("--dtype", "bfloat16" if MODES[request.param].trains_adapter else "float32"),
        ],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    told = [f"{path.name}\n{path.read_text()}" for path in (directory / "logs").glob("*.log")]
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *told])
    return Run(MODES[request.param], directory)


@pytest.mark.timeout(DEADLINE_S + 60)
def test_every_publication_served_what_was_trained(run: Run) -> None:
    records = run.records
    assert [int(record["step"]) for record in records] == list(range(1, STEPS + 1))
    probed = [r for r in records if "alignment/probe_max" in r]
    assert probed
    if run.mode.trains_adapter:  # in bfloat16
        assert max(r["alignment/probe_abs_mean"] for r in probed) < BFLOAT16_NOISE
        return
    assert max(r["alignment/probe_max"] for r in probed) < FLOAT32_NOISE
    assert max(r["alignment/probe_moved"] for r in probed) > 2 * FLOAT32_NOISE
    fresh = [r["alignment/diff_max"] for r in records if r["staleness/max"] == 0]
    assert all(difference < 10 * FLOAT32_NOISE for difference in fresh)


def test_the_engine_ran_on_the_gpu_with_graphs(run: Run) -> None:
    log = run.log("vllm-server")
    assert "enforce_eager=False" in log
    assert "Capturing CUDA graphs" in log or "Graph capturing finished" in log


def test_the_trainer_ran_on_the_gpu(run: Run) -> None:
    times = json.loads((run.directory / "checkpoints" / "benchmark.json").read_text())
    assert times["peak_cuda_bytes"] > 0


def test_nothing_was_dropped(run: Run) -> None:
    assert run.server["dropped_requests"] == 0
    assert run.server["crashes"] == 0
    expected = STEPS // RESTART_EVERY_STEPS if run.mode.restarts_engine else 0
    assert run.server["restarts"] == expected
    assert processes_that_log_below(run.directory / "logs") == []
