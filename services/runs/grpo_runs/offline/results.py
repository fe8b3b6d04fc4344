"""Reads what a run wrote below `metrics/`, and draws its curves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_runs.offline.run_files import BEFORE, RunFiles

Metrics = dict[str, Any]
_SIZE_INCHES, _DPI = (10.0, 6.5), 110
_LOSSES = {"loss_total": "total", "loss_pg": "policy", "loss_kl": "KL", "loss_entropy": "entropy"}


@dataclass(frozen=True)
class RunResult:
    """What a sweep ranks a run by.

    score: mean@1 of the last evaluation, or the mean reward of the last iteration
    lift: its change since before the training
    """

    score: float
    lift: float
    reward_first: float
    reward_last: float


def result_of(files: RunFiles) -> RunResult:
    records = train_records(files)
    rewards = [record["reward_mean"] for record in records]
    scores = [fmean(task["mean@1"] for task in tasks) for _, tasks in evaluations(files)] or rewards
    return RunResult(scores[-1], scores[-1] - scores[0], rewards[0], rewards[-1])


def train_records(files: RunFiles) -> list[Metrics]:
    """The record of each iteration, in order."""
    paths = sorted(files.train(0).parent.glob("train_iter_*.json"))
    return [json.loads(path.read_text()) for path in paths]


def evaluations(files: RunFiles) -> list[tuple[int, list[Metrics]]]:
    """The number of iterations before each evaluation, and its metrics by task."""
    found = []
    before = files.evaluation(BEFORE)
    if before.is_file():
        found.append((0, _by_task(before)))
    for path in sorted(before.parent.glob("eval_iter_*.json")):
        found.append((int(path.stem.rpartition("_")[2]) + 1, _by_task(path)))
    return found


def _by_task(path: Path) -> list[Metrics]:
    record = json.loads(path.read_text())
    tasks: list[Metrics] = record.get("tasks", [record])
    return tasks


def draw(files: RunFiles) -> None:
    """Rewards and evaluations, losses, the KL divergence, the gradient norm; by iteration."""
    from matplotlib.figure import Figure

    records = train_records(files)
    figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained")
    (rewards, losses), (divergence, gradient) = figure.subplots(2, 2)
    _reward_panel(rewards, files, records)
    for name, label in _LOSSES.items():
        _line(losses, records, name, label)
    losses.set_title("loss")
    _line(divergence, records, "kl_divergence", "KL divergence (nats per token)")
    _line(divergence, records, "kl_coef", "coefficient")
    divergence.set_title("KL penalty")
    _line(gradient, records, "grad_norm", "gradient norm")
    gradient.set_title("gradient norm before clipping")
    for axes in (rewards, losses, divergence, gradient):
        axes.set_xlabel("iterations")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small", frameon=False)
    figure.savefig(files.plot)


def _reward_panel(axes: Any, files: RunFiles, records: Sequence[Metrics]) -> None:
    _line(axes, records, "reward_mean", "reward of the rollouts")
    found = evaluations(files)
    for index, first in enumerate(found[0][1] if found else ()):
        points = [(done, tasks[index]["mean@1"]) for done, tasks in found]
        label = f"mean@1, {first['task']}"
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
    axes.set_title("reward")


def _line(axes: Any, records: Sequence[Metrics], name: str, label: str) -> None:
    points = [(r["iteration"] + 1, r[name]) for r in records if r.get(name) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), label=label)
