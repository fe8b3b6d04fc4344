"""Runs the sides of a comparison in turns, each measurement in a process of its own."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import structlog
import torch

from benchmarks.report import verdict
from grpo_core.cpu import CPU
from grpo_tiny_model.model import default_cache_directory
from grpo_trainer.telemetry.speed import product_rate

Reading = dict[str, Any]
PINS = Path(__file__).parents[2] / "requirements" / "trl.txt"
_log = structlog.get_logger()


def in_turn(
    name: str, rounds: int, sides: Mapping[str, Callable[[], Reading]]
) -> dict[str, list[Reading]]:
    """Every side's readings, by side."""
    found: dict[str, list[Reading]] = {side: [] for side in sides}
    for turn in range(rounds):
        for side, measure in sides.items():
            found[side].append(measure())
            numbers = {k: v for k, v in found[side][-1].items() if isinstance(v, float | int)}
            _log.info("measured", name=name, side=side, turn=turn, **numbers)
    return found


def work_file(scratch: Path, **work: Any) -> Path:
    """The work of a measurement, as every side reads it."""
    path = scratch / "work.json"
    path.write_text(json.dumps({**work, "directory": str(scratch / "trl")}))
    return path


def measured_by(*command: str | Path) -> Callable[[], Reading]:
    """A side whose command prints its reading as the last line, in JSON."""

    def measure() -> Reading:
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found: Reading = json.loads(done.stdout.splitlines()[-1])
        return found

    return measure


def trl_side(kind: str, work: Path) -> Callable[[], Reading]:
    """Args: kind: `loop` or `step`"""
    return measured_by(trl_python(), Path(__file__).with_name("trl_side.py"), kind, work)


def our_step(side: str, work: Path) -> Callable[[], Reading]:
    """Args: side: `our_side` or `archived_side`"""
    return measured_by(sys.executable, "-m", f"benchmarks.train_bench.{side}", work)


def trl_python() -> Path:
    """TRL's interpreter. Its cached environment is made on first use, from the package index.

    Raises:
        subprocess.CalledProcessError: pip could not install the pins.
    """
    digest = hashlib.sha256(PINS.read_bytes() + sys.version.encode()).hexdigest()[:12]
    target = default_cache_directory() / f"trl-{digest}"
    python = target / "bin" / "python"
    if not (target / "installed").exists():
        shutil.rmtree(target, ignore_errors=True)
        venv.create(target, with_pip=True, symlinks=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--requirement"]
        subprocess.run([*pip, str(PINS)], check=True)
        (target / "installed").touch()
    return python


def demo_records(*flags: str) -> list[dict[str, Any]]:
    """The metrics of each step of `grpo-demo`. Raises `CalledProcessError` if the run failed."""
    command = [sys.executable, "-m", "grpo_runs", *flags]
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(command, cwd=directory, check=True, stdout=subprocess.DEVNULL)
        metrics = Path(directory) / "runs" / "latest" / "metrics.jsonl"
        return [json.loads(line) for line in metrics.read_text().splitlines()]


def step_flops(record: Mapping[str, float], of_sampling: float) -> float:
    """Floating-point operations that a step of a run needs, by the metrics that it logged: those of
    training, as `ModelFlops` counts them, and those of sampling the same tokens.

    Args:
        of_sampling: of a token, over those of training it. Of 6 for each trained weight, 2 are of
            the forward pass: 1/3. A frozen one needs 4: 1/2
    """
    rate = record["train/mfu"] * record["train/device_tflops"] * 1e12
    return rate * record["train/compute_time"] * (1 + of_sampling)


def all_cores() -> Reading:
    """FLOP/s of float32 matrix products on all cores, measured in turn: those of one thread on each
    core. Two threads of one product would also measure how other work makes them wait."""
    torch.set_num_threads(1)
    return {"rate": CPU.cores * product_rate(torch.device("cpu"), torch.float32)}


def limit_s(found: Mapping[str, Sequence[Reading]]) -> float:
    """Seconds of a step of ours at the rate of `all_cores`. The highest rate counts, because
    other work can only lower it."""
    return median(values(found["ours"], "flops")) / max(values(found["all cores"], "rate"))


def values(readings: Sequence[Reading], key: str, scale: float = 1.0) -> list[float]:
    return [reading[key] / scale for reading in readings]


def goal_of(ratio: float, goal: float | None) -> str:
    return "" if goal is None else f"{goal:g}: {verdict(ratio >= goal)}"
