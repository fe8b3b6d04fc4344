"""Reports the time, memory and disk space of a run (`--benchmark`), as text and as JSON."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from grpo_core.tree.trainer import TrainerSettings
from grpo_core.weights.directory_checks import FINAL_ADAPTER, FINAL_MODEL
from grpo_core.weights.servers import ServerStatus
from grpo_core.weights.version_log import VersionLog
from grpo_trainer.checkpoint.store import StateStore

FILE_NAME = "benchmark.json"
STATUS_DEADLINE_S = 5.0
PARTS = ("step", "sync", "data_fetch", "compute")
"""Of the times of a step that are added up."""
_WIDTH = 70
_GB, _MB = 1e9, 1e6


@dataclass(frozen=True)
class BenchmarkSummary:
    """The fields of `benchmark.json`. A field is None if there is no GPU, no publication, no
    reward, no such file, or no server's status in Redis. Counts are of all inference servers."""

    mode: str
    steps: int  # number of steps that this process took
    total_s: float  # from the start of the first step to the end of the last one
    step_s_mean: float  # from requesting a batch to writing its record
    sync_s_total: float  # of all publications
    sync_s_mean: float | None  # of one publication
    fetch_s_total: float  # of all waits for batches
    compute_s_total: float  # of all steps, without waits and publications
    publishes: int  # after steps; the one at the start does not count
    rss_bytes_mean: float  # resident memory of the trainer process, after each step
    peak_rss_bytes: int
    cuda_bytes_mean: float | None  # GPU memory that the trainer process allocated, after each step
    peak_cuda_bytes: int | None
    checkpoint_bytes: int | None  # of the newest checkpoint on disk
    model_bytes: int | None  # of final_model/ on disk
    adapter_bytes: int | None  # of final_adapter/ on disk
    servers: int | None  # inference servers at the end of the run
    restarts: int | None  # engine starts after the first
    crashes: int | None  # of engines that served; restarts after them were not planned
    dropped_requests: int | None  # requests that drains aborted
    generation_tokens: int | None  # tokens that the server sampled
    reward_first: float | None  # mean reward of the first step
    reward_last: float | None  # mean reward of the last step

    def write(self, save_path: Path) -> None:
        (save_path / FILE_NAME).write_text(json.dumps(asdict(self), indent=1) + "\n")

    def __str__(self) -> str:
        bar, title = "=" * _WIDTH, f"BENCHMARK SUMMARY ({self.mode})"
        sync_s = self.sync_s_mean or 0.0
        sections: dict[str, dict[str, object]] = {
            "TIMING BREAKDOWN": {
                "Avg step time": f"{self.step_s_mean:.2f}s",
                "Total step time": f"{self.step_s_mean * self.steps:.2f}s",
                "Avg sync time": f"{sync_s:.2f}s (x{self.publishes} syncs)",
                "Total sync time": f"{self.sync_s_total:.2f}s",
                "Avg data fetch time": f"{self.fetch_s_total / (self.steps or 1):.2f}s",
                "Total data fetch time": f"{self.fetch_s_total:.2f}s",
                "Total compute time": f"{self.compute_s_total:.2f}s",
            },
            "MEMORY": {
                "Peak GPU memory": _size(self.peak_cuda_bytes),
                "Avg GPU memory": _size(self.cuda_bytes_mean),
                "Peak resident memory": _size(self.peak_rss_bytes),
                "Avg resident memory": _size(self.rss_bytes_mean),
            },
            "DISK": {
                "Checkpoint size": _size(self.checkpoint_bytes),
                "Model size": _size(self.model_bytes),
                "Adapter size": _size(self.adapter_bytes),
            },
        }
        if self.restarts is not None:
            sections["INFERENCE SERVER"] = {
                "Servers": self.servers if self.servers != 1 else None,
                "Restarts": self.restarts,
                "Crashes of the engine": self.crashes,
                "Dropped requests": self.dropped_requests,
                "Generated tokens": self.generation_tokens,
            }
        lines = [
            f"  Total training time:     {self.total_s:.2f}s ({self.total_s / 60:.2f} min)",
            f"  Total steps:             {self.steps}",
        ]
        for name, values in sections.items():
            shown = {label: value for label, value in values.items() if value is not None}
            lines += ["", f"  {name}:", *(f"    {k + ':':<22} {v}" for k, v in shown.items())]
        return "\n".join([bar, title, bar, *lines, bar]) + "\n"


class RunTotals:
    """Adds up the records of a run's steps. Their names are those of `metrics`."""

    def __init__(self) -> None:
        self._steps = self._publishes = 0
        self._total_s = 0.0
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._rss_bytes = self._cuda_bytes = 0
        self._rewards: list[float | None] = []

    def add(self, record: Mapping[str, float], is_served: bool) -> None:
        """Args: is_served: whether the step's result was published."""
        self._steps += 1
        self._publishes += is_served
        for part in PARTS:
            self._seconds[part] += record[f"train/{part}_time"]
        self._total_s = record["time_s"]
        # Resident memory of this process, as proc(5) describes it.
        pages = Path("/proc/self/statm").read_text().split()[1]
        self._rss_bytes += int(pages) * os.sysconf("SC_PAGE_SIZE")
        if torch.cuda.is_available():
            self._cuda_bytes += torch.cuda.memory_allocated()
        self._rewards = [*self._rewards[:1], record.get("reward/mean")]

    def summary(
        self, mode: str, servers: Sequence[ServerStatus], save_path: Path
    ) -> BenchmarkSummary:
        def total(counts: Iterable[int]) -> int | None:
            return sum(counts) if servers else None

        seconds, steps, has_gpu = self._seconds, self._steps or 1, torch.cuda.is_available()
        checkpoint = StateStore(save_path).newest()
        return BenchmarkSummary(
            mode=mode,
            steps=self._steps,
            total_s=self._total_s,
            step_s_mean=seconds["step"] / steps,
            sync_s_total=seconds["sync"],
            sync_s_mean=seconds["sync"] / self._publishes if self._publishes else None,
            fetch_s_total=seconds["data_fetch"],
            compute_s_total=seconds["compute"],
            publishes=self._publishes,
            rss_bytes_mean=self._rss_bytes / steps,
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            cuda_bytes_mean=self._cuda_bytes / steps if has_gpu else None,
            peak_cuda_bytes=torch.cuda.max_memory_allocated() if has_gpu else None,
            checkpoint_bytes=directory_bytes(checkpoint.directory) if checkpoint else None,
            model_bytes=directory_bytes(save_path / FINAL_MODEL),
            adapter_bytes=directory_bytes(save_path / FINAL_ADAPTER),
            servers=len(servers) or None,
            restarts=total(one.restarts for one in servers),
            crashes=total(one.crashes for one in servers),
            dropped_requests=total(one.dropped_requests for one in servers),
            generation_tokens=total(one.generation_tokens for one in servers),
            reward_first=self._rewards[0] if self._rewards else None,
            reward_last=self._rewards[-1] if self._rewards else None,
        )


def servers_of(settings: TrainerSettings) -> list[ServerStatus]:
    """The run's inference servers with their counters; none without Redis."""
    uses_redis = settings.sync.uses_files or "redis_url" in settings.model_fields_set
    if settings.run_id is None or not uses_redis:
        return []
    url = settings.redis_url.get_secret_value()
    with VersionLog(url, settings.run_id, STATUS_DEADLINE_S) as versions:
        return versions.servers_for_report()


def directory_bytes(directory: Path) -> int | None:
    """Size of all files in a directory; None if it does not exist."""
    if not directory.is_dir():
        return None
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _size(count: float | None) -> str | None:
    if count is None:
        return None
    return f"{count / _GB:.2f} GB" if count >= _GB else f"{count / _MB:.2f} MB"
