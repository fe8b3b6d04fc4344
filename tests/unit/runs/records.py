"""Makes records of training steps as the trainer writes them, and lines of evaluations."""

from __future__ import annotations

import json
from typing import Any

from grpo_core.evaluation.results import EvalSummary
from grpo_runs.report.steps import StepRecord
from grpo_runs.run_directory import RunDirectory

BENCHMARK: dict[str, Any] = {
    "sync_s_mean": 0.25,
    "rss_bytes_mean": 40.5 * 2**20,
    "peak_rss_bytes": 50 * 2**20,
    "cuda_bytes_mean": None,
    "peak_cuda_bytes": None,
    "checkpoint_bytes": 12 * 2**20,
    "model_bytes": None,
    "adapter_bytes": 2**19,
}
"""Part of the trainer's `benchmark.json`, on a CPU with an adapter."""

SPEED = "3,086 tokens/s, MFU 41.2 % of the 790 TFLOP/s measured"
"""Of the steps."""


def metrics_object(step: int, /, **changes: Any) -> dict[str, Any]:
    """One step of a run of 40 with round numbers. `changes` replaces values by key."""
    return {
        "step": step,
        "steps": 40,
        "time_s": 1.5 * step,
        "reward/mean": step / 10,
        "train/loss": -0.0123,
        "train/grad_norm": 0.4,
        "train/lr": 1e-3,
        "grpo/mean_ratio": 1.0015,
        "grpo/clipped_fraction": 0.025,
        "alignment/diff_abs_mean": 2.5e-6,
        "alignment/diff_max": 1e-5,
        "staleness/mean": 0.5,
        "staleness/max": 1,
        "throughput/tokens_per_s": 1234.4,
        "train/tokens_per_s": 3086.0,
        "train/mfu": 0.4125,
        "train/device_tflops": 790.0,
        "rollout/generation_time": 0.8,
        "train/data_fetch_time": 0.3,
        "train/compute_time": 0.6,
        "train/sync_time": 0.05,
        "train/step_time": 1.5,
    } | changes


def metrics_line(step: int, /, **changes: Any) -> str:
    return json.dumps(metrics_object(step, **changes)) + "\n"


def take_steps(run: RunDirectory, *steps: int, **changes: Any) -> None:
    with run.metrics.open("a") as file:
        file.writelines(metrics_line(step, **changes) for step in steps)


def evaluation(step: int | None, value: float, **fields: Any) -> EvalSummary:
    given: dict[str, Any] = {
        **{"task": "sums", "temperature": 0.0, "samples": 1, "item_count": 4, "duration_s": 1.0},
        **{"step": step, "metrics": {"length": 3.0, "pass@1": value}},
        "intervals": {"pass@1": (value - 0.125, value + 0.125)},
    }
    return EvalSummary(**given | fields)


def record(step: int, /, **changes: Any) -> StepRecord:
    return StepRecord.model_validate(metrics_object(step, **changes))
