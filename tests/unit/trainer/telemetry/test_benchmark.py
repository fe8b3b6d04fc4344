"""The summary of `--benchmark`: times, memory and disk space, as text and as JSON."""

from __future__ import annotations

import json
import mmap
from dataclasses import replace
from pathlib import Path

import torch

from grpo_core.weights.servers import ServerState, ServerStatus
from grpo_trainer.telemetry.benchmark import BenchmarkSummary, RunTotals


def step(time_s: float) -> dict[str, float]:
    """A step of 2 s: 0.5 s of waiting, 1 s of computing, 0.25 s of publishing."""
    times = {"step": 2.0, "sync": 0.25, "data_fetch": 0.5, "compute": 1.0}
    return {"time_s": time_s} | {f"train/{name}_time": took for name, took in times.items()}


def measured(save_path: Path) -> BenchmarkSummary:
    """Two steps, of which the second one is published."""
    watch = RunTotals()
    watch.add(step(2.0), is_served=False)
    watch.add(step(4.0), is_served=True)
    return watch.summary("lora_only", [], save_path)


def test_resident_memory_is_measured_after_each_step(tmp_path: Path) -> None:
    watch = RunTotals()
    watch.add(step(2.0), is_served=True)
    # A tensor may reuse memory that the process has freed, but not returned.
    ballast = mmap.mmap(-1, 256 * 2**20)
    for page in range(0, len(ballast), mmap.PAGESIZE):
        ballast[page] = 1
    watch.add(step(4.0), is_served=True)
    summary = watch.summary("none", [], tmp_path)
    ballast.close()
    lone = measured(tmp_path).rss_bytes_mean
    assert 96 * 2**20 < summary.rss_bytes_mean - lone < 160 * 2**20  # half of the ballast
    assert summary.peak_rss_bytes >= summary.rss_bytes_mean
    assert (summary.cuda_bytes_mean is None) is not torch.cuda.is_available()


def test_times_add_up_and_sizes_on_disk_are_those_of_the_files(tmp_path: Path) -> None:
    adapter = tmp_path / "final_adapter"
    (adapter / "below").mkdir(parents=True)
    (adapter / "adapter_model.safetensors").write_bytes(bytes(2_000_000))
    (adapter / "below" / "tokenizer.json").write_bytes(bytes(500_000))
    summary = measured(tmp_path)
    assert (summary.steps, summary.total_s, summary.step_s_mean) == (2, 4.0, 2.0)
    # A publication costs what all cost by their number.
    assert (summary.fetch_s_total, summary.sync_s_total, summary.sync_s_mean) == (1.0, 0.5, 0.5)
    assert (summary.adapter_bytes, summary.model_bytes) == (2_500_000, None)
    assert summary.checkpoint_bytes is None
    summary.write(tmp_path)
    assert json.loads((tmp_path / "benchmark.json").read_text())["adapter_bytes"] == 2_500_000


def test_the_text_names_resident_memory_on_a_cpu_and_gpu_memory_on_a_gpu(tmp_path: Path) -> None:
    on_cpu = replace(
        measured(tmp_path),
        cuda_bytes_mean=None,
        peak_cuda_bytes=None,
        rss_bytes_mean=1.5e9,
        checkpoint_bytes=48_000_000,
    )
    assert "GPU" not in str(on_cpu)
    assert "    Avg resident memory:   1.50 GB\n" in str(on_cpu)
    assert "    Checkpoint size:       48.00 MB\n" in str(on_cpu)
    assert "    Avg sync time:         0.50s (x1 syncs)\n" in str(on_cpu)
    on_gpu = str(replace(on_cpu, cuda_bytes_mean=18.88e9, peak_cuda_bytes=31_440_000_000))
    assert "    Peak GPU memory:       31.44 GB\n    Avg GPU memory:        18.88 GB\n" in on_gpu


def test_crashes_of_all_engines_are_counted(tmp_path: Path) -> None:
    one = ServerStatus(name="a", state=ServerState.SERVING, epoch=1, step=1, restarts=3, crashes=1)
    summary = RunTotals().summary("none", [one], tmp_path)
    assert "    Restarts:              3\n    Crashes of the engine: 1\n" in str(summary)
    two = one.model_copy(update={"name": "b", "restarts": 1})
    summary = RunTotals().summary("none", [one, two], tmp_path)
    assert "    Servers:               2\n    Restarts:              4\n" in str(summary)
