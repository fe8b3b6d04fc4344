"""Every mode trains the tiny model on the GPU, with compilation and CUDA graphs on.

The tests in tests/inference also run on a GPU and check what else each mode promises.
"""

from __future__ import annotations

import json

import pytest

from grpo_runs.modes import MODES
from tests.e2e.demo_run import ModeRun, run_demo
from tests.fixtures.inference import FLOAT32_NOISE

STEPS = 6
RESTART_EVERY_STEPS = 3
DEADLINE_S = 200
BFLOAT16_NOISE = 0.05
"""Bound on the mean |difference| of logprobs."""


@pytest.fixture(scope="module", params=sorted(MODES))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModeRun:
    mode = MODES[request.param]
    made = run_demo(
        tmp_path_factory.mktemp(request.param) / "run",
        *("--mode", request.param, "--trainer.optimizer", "adamw"),
        *("--steps", str(STEPS), "--vllm-restart-interval", str(RESTART_EVERY_STEPS)),
        *("--kv-cache-mib", "64"),  # leaves room for what else uses the GPU
        # vLLM's LoRA kernels for GPUs do not take float32.
        *("--dtype", "bfloat16" if mode.trains_adapter else "float32"),
    )
    return ModeRun(made.directory, made.output, made.errors, mode)


@pytest.mark.timeout(DEADLINE_S + 60)
def test_every_publication_served_what_was_trained(run: ModeRun) -> None:
    records = run.records
    assert [int(record["step"]) for record in records] == list(range(1, STEPS + 1))
    probed = [r for r in records if "alignment/probe_max" in r]
    assert probed
    if run.mode.trains_adapter:  # in bfloat16
        assert all(r["alignment/probe_abs_mean"] < BFLOAT16_NOISE for r in probed)
        return
    assert all(r["alignment/probe_max"] < FLOAT32_NOISE for r in probed)
    assert max(r["alignment/probe_moved"] for r in probed) > 2 * FLOAT32_NOISE
    fresh = [r["alignment/diff_max"] for r in records if r["staleness/max"] == 0]
    assert all(difference < 10 * FLOAT32_NOISE for difference in fresh)


def test_the_engine_ran_on_the_gpu_with_graphs(run: ModeRun) -> None:
    log = (run.directory / "logs" / "vllm-server.log").read_text()
    assert "enforce_eager=False" in log
    assert "Capturing CUDA graphs" in log or "Graph capturing finished" in log


def test_the_trainer_ran_on_the_gpu(run: ModeRun) -> None:
    times = json.loads((run.directory / "checkpoints" / "benchmark.json").read_text())
    assert times["peak_cuda_bytes"] > 0


def test_nothing_was_dropped(run: ModeRun) -> None:
    expected = STEPS // RESTART_EVERY_STEPS if run.mode.restarts_engine else 0
    assert run.server.restarts == expected
    assert (run.server.dropped_requests, run.server.crashes) == (0, 0)
