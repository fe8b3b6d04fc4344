"""Reads what a run wrote below `metrics/`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_offline.run_files import BEFORE, RunFiles

Metrics = dict[str, Any]


@dataclass(frozen=True)
class RunResult:
    """What a sweep ranks a run by.

    before, after: metrics of the first and of the last evaluation, one entry per task
    """

    directory: Path
    iterations: int
    reward_first: float
    reward_last: float
    before: list[Metrics]
    after: list[Metrics]

    @property
    def score(self) -> float:
        """mean@1 of the last evaluation, or the mean reward of the last iteration."""
        found = [one["mean@1"] for one in self.after]
        return sum(found) / len(found) if found else self.reward_last


def result_of(files: RunFiles) -> RunResult:
    records = train_records(files)
    found = evaluations(files)
    return RunResult(
        files.path,
        len(records),
        records[0]["reward_mean"],
        records[-1]["reward_mean"],
        found[0][1] if found else [],
        found[-1][1] if found else [],
    )


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
