"""CPU time of each service of a `grpo-demo`, between two training steps."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.train_bench.turns import Reading

WARM_UP_STEPS = 10
_LAST_STEPS = 3
"""Not measured: services end one after the other."""
_POLL_S = 0.1
_OTHERS = "runner and Redis"
SERVICES = {
    "grpo_env": "environment",
    "grpo_api": "run-api",
    "grpo_vllm": "inference server",
    "grpo_trainer": "trainer",
}
"""By the module that runs each service."""


def cpu_shares(steps: int, flags: Sequence[str] = ()) -> Reading:
    """Shares of all CPU time of the run in percent, by service; `env_ms` and `all_ms` of CPU time
    per step; `steps_per_s`."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        words = ["--steps", str(steps), "--run-dir", str(run), "--eval-every", "0", *flags]
        with subprocess.Popen(
            [sys.executable, "-m", "grpo_runs", *words], stdout=subprocess.DEVNULL
        ) as demo:
            metrics = run / "metrics.jsonl"
            first = _after_step(demo, metrics, WARM_UP_STEPS)
            before, began = _cpu_by_service(demo.pid), time.monotonic()
            last = _after_step(demo, metrics, steps - _LAST_STEPS)
            after, ended = _cpu_by_service(demo.pid), time.monotonic()
            if demo.wait():
                raise RuntimeError(f"grpo-demo {' '.join(words)} failed; run it by hand")
    used = {name: after[name] - before.get(name, 0.0) for name in after}
    total, counted = sum(used.values()), last - first
    return {
        **{name: 100 * seconds / total for name, seconds in used.items()},
        "env_ms": 1000 * used["environment"] / counted,
        "all_ms": 1000 * total / counted,
        "steps_per_s": counted / (ended - began),
        "load": os.getloadavg()[0],
    }


def _after_step(demo: subprocess.Popen[bytes], metrics: Path, step: int) -> int:
    """Wait until this step is logged; returns the number of steps logged."""
    while demo.poll() is None:
        logged = metrics.read_text().count("\n") if metrics.exists() else 0
        if logged >= step:
            return logged
        time.sleep(_POLL_S)
    raise RuntimeError(f"grpo-demo ended with status {demo.returncode} before step {step}")


def _cpu_by_service(pid: int) -> dict[str, float]:
    """Seconds since the start. A service's child processes count as the service."""
    found = {_OTHERS: _cpu_s(psutil.Process(pid))}
    for child in psutil.Process(pid).children():
        name = _service_of(child)
        family = [child, *child.children(recursive=True)]
        found[name] = found.get(name, 0.0) + sum(map(_cpu_s, family))
    return found


def _service_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        for word in process.cmdline():
            if word in SERVICES:
                return SERVICES[word]
    return _OTHERS


def _cpu_s(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0
