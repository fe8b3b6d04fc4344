"""Processes that outlived their run."""

from __future__ import annotations

from pathlib import Path

import psutil


def processes_that_log_below(logs: Path) -> list[int]:
    """Every process of a run, engine included, keeps its log open as its standard output."""
    resolved = logs.resolve()
    return [
        process.pid
        for process in psutil.process_iter()
        if resolved in standard_output(process.pid).parents
    ]


def standard_output(pid: int) -> Path:
    try:
        return Path(f"/proc/{pid}/fd/1").readlink()
    except OSError:  # ended meanwhile, or not ours to look at
        return Path("/")
