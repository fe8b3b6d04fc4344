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
from typing import Any

import structlog

from benchmarks.report import verdict
from grpo_tiny_model.model import default_cache_directory

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


def values(readings: Sequence[Reading], key: str, scale: float = 1.0) -> list[float]:
    return [reading[key] / scale for reading in readings]


def goal_of(ratio: float, goal: float | None) -> str:
    return "" if goal is None else f"{goal:g}: {verdict(ratio >= goal)}"
