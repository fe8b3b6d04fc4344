"""Where one run keeps its files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from grpo_core.errors import GrpoError

RUNS = Path("runs")
LATEST = "latest"


class RunDirectoryUnusable(GrpoError):
    """The run directory, or the `latest` link beside it, cannot be used without losing a file."""


@dataclass(frozen=True)
class RunDirectory:
    """The files of one run. `path.name` is the run's id."""

    path: Path

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def redis(self) -> Path:
        return self.path / "redis"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def reward_plot(self) -> Path:
        return self.path / "reward.png"


def create_run_directory(path: Path | None, seed: int) -> RunDirectory:
    """Make the directory; where it lies in `runs/`, point `runs/latest` at it.

    Raises:
        RunDirectoryUnusable: it holds files already, or `latest` is not a link.
    """
    run = RunDirectory(path or RUNS / default_name(datetime.now(UTC), seed))
    require_unused(run.path, "an earlier run", "--run-dir")
    for directory in (run.logs, run.redis):
        directory.mkdir(parents=True, exist_ok=True)
    if run.path.parent.resolve() == RUNS.resolve():
        point_latest_at(run.path)
    return run


def require_unused(path: Path, what: str, option: str) -> None:
    """Raises `RunDirectoryUnusable` if there is anything but an empty directory."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RunDirectoryUnusable(
            f"{path} holds {what}; name a new or empty directory with {option}"
        )


def default_name(now: datetime, seed: int) -> str:
    """Sorts by time: `20250131T235959Z-0`."""
    return f"{now:%Y%m%dT%H%M%SZ}-{seed}"


def point_latest_at(run: Path) -> None:
    """Replace the `latest` link beside `run` in one step."""
    link = run.parent / LATEST
    if link.exists() and not link.is_symlink():
        raise RunDirectoryUnusable(f"{link} is not a symbolic link; move it away")
    temporary = run.parent / f".{LATEST}-{os.getpid()}"
    temporary.symlink_to(run.name)
    temporary.replace(link)
