"""The record of one job of a sweep: `job.json` in the job's directory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_core.errors import GrpoError
from grpo_offline.results import RunResult

JOB_FILE = "job.json"


class NoSweep(GrpoError):
    """A directory holds no jobs of a sweep."""


@dataclass
class JobRecord:
    """What one job was given and what came of it: `result`, or `error`."""

    directory: str
    overrides: dict[str, Any]
    result: RunResult | None = None
    error: str | None = None


@dataclass(frozen=True)
class Job:
    """One job as its record says.

    score: mean@1 after the training, or the last mean reward; None if the job failed
    lift: change of mean@1 since before the training, or of the mean reward
    """

    directory: str
    overrides: dict[str, Any] = field(default_factory=dict)
    score: float | None = None
    lift: float | None = None
    reward_first: float | None = None
    reward_last: float | None = None
    error: str | None = None


def write_job(directory: Path, record: JobRecord) -> None:
    result = record.result
    content: dict[str, Any] = {
        "directory": record.directory,
        "overrides": record.overrides,
        "error": record.error,
    }
    if result is not None:
        begun = [one["mean@1"] for one in result.before]
        first = sum(begun) / len(begun) if begun else result.reward_first
        content |= {
            "score": result.score,
            "lift": result.score - first,
            "reward_first": result.reward_first,
            "reward_last": result.reward_last,
        }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / JOB_FILE).write_text(json.dumps(content, indent=2) + "\n")


def read_jobs(sweep: Path) -> list[Job]:
    """All jobs, the best one first and failed ones last.

    Raises:
        NoSweep: there are none.
    """
    jobs = [*_read(sweep)]
    if not jobs:
        raise NoSweep(
            f"{sweep} holds no jobs; name the directory of a sweep, for example "
            "multirun/2026-01-31/12-00-00"
        )
    return sorted(jobs, key=lambda job: (job.score is None, -(job.score or 0.0), job.directory))


def _read(sweep: Path) -> Iterator[Job]:
    for path in sweep.glob(f"*/{JOB_FILE}"):
        yield Job(**json.loads(path.read_text()))
