"""The files of one run: their paths, and the lock on the run's directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grpo_core.errors import GrpoError
from grpo_core.rollouts.files import ROLLOUTS, steps_in
from grpo_core.tree.sections import NAME, SECTIONS

RUNS = Path("runs")
LATEST = "latest"
ONE_SERVER, ONE_OF_SERVERS = "vllm-server", "server-"
"""Name of the process of a single server, and how those of several begin."""
MODEL_JOB = "model"
"""Name of the process that makes a model, which is no service."""
_LOCK = ".lock"
_RUN_ID = "run-id"
_STATES = "trainer_state"
_CHECKPOINT = re.compile(r"(\d{6,})_step_(\d+)")
"""Name of a checkpoint's directory: its number, which counts up, and its step."""


class RunDirectoryUnusable(GrpoError):
    """The run directory or the link `latest` is in use, or contains files that would be lost."""


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.logs = path / "logs"
        self.redis = path / "redis"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.summary = path / "summary.json"
        self.reward_plot = path / "reward.png"
        self.report = path / "report.html"
        self.evaluations = path / "eval.jsonl"
        self.curricula = path / "curriculum"
        self.untrained = path / "untrained"
        self.services = path / "services.json"
        self.processes = path / "processes.jsonl"

    @classmethod
    def of(cls, path: Path) -> RunDirectory:
        """Of an earlier run. A link such as `runs/latest` is followed."""
        return cls(path.parent / path.readlink() if path.is_symlink() else path)

    @property
    def run_id(self) -> str:
        """Saved at the start, since keys in Redis contain it and the directory may be renamed.

        Raises:
            RunDirectoryUnusable: its file cannot be read, or is empty.
        """
        file = self.path / _RUN_ID
        if not file.is_file():
            return self.path.resolve().name
        try:
            if saved := file.read_text().strip():
                return saved
            problem = "it is empty"
        except (OSError, UnicodeDecodeError) as error:
            problem = str(error)
        raise RunDirectoryUnusable(
            f"{file} cannot be read: {problem}; write the id of the run into it, which is the name "
            "that the run's directory had at its start"
        )

    @property
    def rollouts(self) -> Path | None:
        """Directory with the rollouts of a run, of a trainer's save path, or this directory itself;
        None if no rollouts were recorded."""
        places = (self.path / ROLLOUTS, self.checkpoints / ROLLOUTS, self.path)
        return next((at for at in places if at.is_dir() and steps_in(at)), None)

    @property
    def untrained_rollouts(self) -> dict[str, Path]:
        """Directories of other rollouts: `{"dropped of gsm8k": Path("untrained/gsm8k/dropped")}`"""
        found = sorted(self.untrained.glob("*/*/"))
        return {f"{at.name} of {at.parent.name}": at for at in found}

    def write_config(self, text: str) -> None:
        temporary = self.config.with_suffix(".part")
        temporary.write_text(text)
        temporary.replace(self.config)

    def newest_checkpoint_step(self) -> int | None:
        """Steps that the newest checkpoint of the trainer includes; None if there is none."""
        paths = (self.checkpoints / _STATES).glob("*_step_*")
        found = [match for path in paths if (match := _CHECKPOINT.fullmatch(path.name))]
        newest = max(found, key=lambda match: int(match[1]), default=None)
        return None if newest is None else int(newest[2])

    def disk_use(self) -> str:
        """The size of all files, and of those that only a resumed run and replays read."""
        states = self.checkpoints / _STATES
        sizes: dict[Path, int] = {}
        for at in self.path.rglob("*"):
            with contextlib.suppress(OSError):  # removed meanwhile
                sizes[at] = at.lstat().st_size if at.is_file() else 0
        of_states = sum(size for at, size in sizes.items() if at.is_relative_to(states))
        return (
            f"{sum(sizes.values()) / 1e6:,.0f} MB; {of_states / 1e6:,.0f} MB of it, in "
            f"{states.relative_to(self.path)}, only for --resume and grpo-replay"
        )

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keep other commands out of the directory while the context is open.

        Raises:
            RunDirectoryUnusable: another command uses it.
        """
        with (self.path / _LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunDirectoryUnusable(
                    f"{self.path} is in use by another grpo-demo process; stop that process first"
                ) from None
            yield

    def is_in_use(self) -> bool:
        try:
            with self.hold():
                return False
        except RunDirectoryUnusable:
            return True


def server_names(number: int) -> list[str]:
    """The names of the servers' processes, and of their logs."""
    return [ONE_SERVER] if number == 1 else [f"{ONE_OF_SERVERS}{k}" for k in range(number)]


def options_in(content: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a run's configuration by field, in sections or without:
    `task: {name: gsm8k, held-out: 0.3}` → `{"task": "gsm8k", "held_out": 0.3}`."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        if key in SECTIONS and isinstance(value, Mapping):
            found |= {key if name == NAME else _field(name): held for name, held in value.items()}
        else:
            found[_field(key)] = value
    return found


def _field(name: str) -> str:
    return str(name).replace("-", "_")


def create_run_directory(path: Path | None, seed: int) -> RunDirectory:
    """Make the directory; if it is in `runs/`, point `runs/latest` at it.

    Raises:
        RunDirectoryUnusable: it is not empty, or `latest` is not a link.
    """
    run = RunDirectory(path or RUNS / default_name(datetime.now(UTC), seed))
    if problem := unusable(run.path, "--run-dir"):
        raise RunDirectoryUnusable(problem)
    for directory in (run.logs, run.redis):
        directory.mkdir(parents=True, exist_ok=True)
    (run.path / _RUN_ID).write_text(run.run_id + "\n")
    if run.path.parent.resolve() == RUNS.resolve():
        point_latest_at(run.path)
    return run


def unusable(path: Path, option: str) -> str | None:
    """The problem of a directory for new files; None if it is empty or does not exist."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return None
    if RunDirectory(path).config.exists():
        return (
            f"{option} {path}: this directory holds an earlier run; name a new directory, or "
            f"continue that run with --resume {path}"
        )
    return f"{option} {path}: this path is not an empty directory; name a new directory"


def default_name(now: datetime, seed: int) -> str:
    """For example `20250131T235959Z-0`: sorted by name, runs are sorted by time."""
    return f"{now:%Y%m%dT%H%M%SZ}-{seed}"


def point_latest_at(run: Path) -> None:
    """Replace the `latest` link beside `run` in one step."""
    link = run.parent / LATEST
    if link.exists() and not link.is_symlink():
        raise RunDirectoryUnusable(
            f"cannot replace {link}, because {link} is not a symbolic link; rename or delete {link}"
        )
    temporary = run.parent / f".{LATEST}-{os.getpid()}"
    temporary.symlink_to(run.name)
    temporary.replace(link)
