"""Finds processes that outlived their run."""

from __future__ import annotations

from pathlib import Path

import psutil


def processes_that_log_below(logs: Path) -> list[int]:
    """Ids of processes whose standard output is a file below `logs`, as is the case in a run."""
    resolved = logs.resolve()
    return [
        process.pid
        for process in psutil.process_iter()
        if resolved in standard_output(process.pid).parents
    ]


def standard_output(pid: int) -> Path:
    try:
        return Path(f"/proc/{pid}/fd/1").readlink()
    except OSError:  # it has ended, or belongs to another user
        return Path("/")
