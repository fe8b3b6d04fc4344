"""`grpo-sweep RUN`: ranks the jobs of a sweep, one run for each combination of values."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table

from grpo_core.errors import GrpoError, parsing
from grpo_runs.offline.errors import NoSweep
from grpo_runs.report.steps import optional

JOB_FILE = "job.json"
_SHOWN_BARS = 40
_INCHES_PER_BAR = 0.3
_WIDTH = 200
"""Of the table, in columns: it is not cut off if it is written to a file."""


@dataclass(frozen=True)
class Job:
    """One job as its file says. The numbers are those of `RunResult`; None if the job failed."""

    directory: str
    overrides: dict[str, Any]
    score: float | None = None
    lift: float | None = None
    reward_first: float | None = None
    reward_last: float | None = None
    error: str | None = None


_JOB = TypeAdapter(Job)


def write_job(directory: Path, job: Job) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / JOB_FILE).write_text(json.dumps(asdict(job), indent=2) + "\n")


def read_jobs(sweep: Path) -> list[Job]:
    """All jobs, the best one first and failed ones last.

    Raises:
        NoSweep: there are none.
    """
    jobs = [_job(path) for path in sweep.glob(f"*/{JOB_FILE}")]
    if not jobs:
        raise NoSweep(f"{sweep} holds no jobs; name a sweep, such as multirun/2026-01-31/12-00-00")
    jobs.sort(key=lambda job: (len(job.directory), job.directory))  # by Hydra's numbers
    return sorted(jobs, key=lambda job: (job.score is None, -(job.score or 0.0)))


def _job(path: Path) -> Job:
    """Raises `NoSweep`."""
    try:
        with parsing(f"{path} is no result of a job, so remove it", NoSweep):
            return _JOB.validate_json(path.read_bytes())
    except OSError as error:
        raise NoSweep(f"{path} cannot be read: {error.strerror}") from error


def report_sweep(sweep: Path) -> None:
    """Write both files and print the table.

    Raises:
        NoSweep: the directory holds no jobs.
    """
    jobs = read_jobs(sweep)
    content = {"jobs": [asdict(job) for job in jobs]}
    (sweep / "sweep.json").write_text(json.dumps(content, indent=2) + "\n")
    _draw(jobs, sweep / "sweep.png")
    print_table(sweep, jobs)


def print_table(sweep: Path, jobs: Sequence[Job]) -> None:
    varied = _varied(jobs)
    table = Table(box=None, pad_edge=False)
    for title in ("rank", "job", *varied):
        table.add_column(title, no_wrap=True, overflow="fold")
    for title in ("mean@1", "lift", "first reward", "last reward"):
        table.add_column(title, justify="right", no_wrap=True)
    for rank, job in enumerate(jobs, start=1):
        table.add_row(
            "failed" if job.error else str(rank),
            job.directory,
            *(str(job.overrides.get(name, "")) for name in varied),
            *(
                optional(value, ".3f")
                for value in (job.score, job.lift, job.reward_first, job.reward_last)
            ),
        )
    console = Console(highlight=False, soft_wrap=True, width=_WIDTH)
    console.print(table)
    for job in jobs:
        if job.error:
            console.print(f"job {job.directory} failed: {job.error}", markup=False)
    console.print(f"{sweep / 'sweep.json'}, {sweep / 'sweep.png'}", markup=False)


def _varied(jobs: Sequence[Job]) -> list[str]:
    """The keys that differ between jobs."""
    names = sorted({name for job in jobs for name in job.overrides})
    return [n for n in names if len({repr(job.overrides.get(n)) for job in jobs}) > 1] or names


def _draw(jobs: Sequence[Job], path: Path) -> None:
    from matplotlib.figure import Figure

    shown = [job for job in jobs if job.score is not None][:_SHOWN_BARS]
    figure = Figure(figsize=(9, 1.2 + _INCHES_PER_BAR * len(shown)), dpi=110, layout="constrained")
    axes = figure.subplots()
    varied = _varied(jobs)
    labels = [f"{job.directory}: {_label(job, varied)}" for job in shown]
    axes.barh(labels, [job.score or 0.0 for job in shown])
    axes.invert_yaxis()
    axes.set_xlabel("mean@1 after the training (mean reward without an evaluation)")
    figure.savefig(path)


def _label(job: Job, varied: Sequence[str]) -> str:
    return " ".join(f"{name.rpartition('.')[2]}={job.overrides.get(name)}" for name in varied)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="grpo-sweep", description="Ranks the jobs of a sweep of grpo-offline -m."
    )
    parser.add_argument("run", type=Path, help="Directory of the sweep, below multirun/")
    try:
        report_sweep(parser.parse_args(argv).run)
    except GrpoError as error:
        sys.stderr.write(f"grpo-sweep: {error}\n")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
