"""Reads what a run wrote below `metrics/`, and draws its curves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_core.rollouts.page.encode import Point
from grpo_runs.offline.run_files import BEFORE, RunFiles

Metrics = dict[str, Any]
_PANELS = {
    "reward": {"reward_mean": "reward of the rollouts"},
    "loss": {
        "loss_total": "total",
        "loss_pg": "policy",
        "loss_kl": "KL",
        "loss_entropy": "entropy",
    },
    "KL penalty": {"kl_divergence": "KL divergence (nats per token)", "kl_coef": "coefficient"},
    "gradient norm before clipping": {"grad_norm": "gradient norm"},
}
"""Labels of the curves by the names of the metrics, for each panel of the plot."""


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
    paths = sorted(files.train(0).parent.glob("train_iter_*.json"), key=_number)
    return [json.loads(path.read_text()) for path in paths]


def evaluations(files: RunFiles) -> list[tuple[int, list[Metrics]]]:
    """The number of iterations before each evaluation, and its metrics by task."""
    before = files.evaluation(BEFORE)
    found = [(0, _by_task(before))] if before.is_file() else []
    paths = sorted(before.parent.glob("eval_iter_*.json"), key=_number)
    return found + [(_number(path) + 1, _by_task(path)) for path in paths]


def _number(path: Path) -> int:
    """Of the iteration. Names do not sort by it: they have three digits, from 1000 on four."""
    return int(path.stem.rpartition("_")[2])


def _by_task(path: Path) -> list[Metrics]:
    record = json.loads(path.read_text())
    tasks: list[Metrics] = record.get("tasks", [record])
    return tasks


def draw(files: RunFiles) -> None:
    """Rewards and evaluations, losses, the KL divergence, the gradient norm; by iteration."""
    from grpo_runs.report.plots import draw_panels

    records = train_records(files)

    def curve(name: str) -> list[Point]:
        known = (record for record in records if record.get(name) is not None)
        return [(record["iteration"] + 1, record[name]) for record in known]

    panels = {
        title: {label: curve(name) for name, label in labels.items()}
        for title, labels in _PANELS.items()
    }
    found = evaluations(files)
    for index, first in enumerate(found[0][1] if found else ()):
        points: list[Point] = [(done, tasks[index]["mean@1"]) for done, tasks in found]
        panels["reward"][f"mean@1, {first['task']}"] = points
    draw_panels(panels, "iterations", files.plot)


def lift_lines(files: RunFiles) -> Iterator[str]:
    """The change of every metric of every task since the first evaluation."""
    found = evaluations(files)
    for first, last in zip(found[0][1], found[-1][1], strict=True) if found else ():
        for name in [name for name in last if "@" in name]:
            change = last[name] - first[name]
            yield (
                f"{last['task']}: {name} {first[name]:.3f} to {last[name]:.3f} ({change:+.3f}) "
                f"on {last['items']} items"
            )
