"""Tells which processes are alive, by process id."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

SLEEP = "import time; time.sleep(600)"


def is_alive(pid: int) -> bool:
    """A zombie counts as dead."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def processes_with(variable: str, value: str) -> list[psutil.Process]:
    """Those that run with this variable in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it ended
            if process.environ().get(variable) == value:
                found.append(process)
    return found


def stop_for(seconds: float, processes: Sequence[psutil.Process]) -> None:
    """Stop them with SIGSTOP, and let them go on."""
    for process in processes:
        process.suspend()
    time.sleep(seconds)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it was replaced
            process.resume()


@contextmanager
def unrelated_process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that no test may end."""
    bystander = subprocess.Popen([sys.executable, "-c", SLEEP])
    try:
        yield bystander
    finally:
        bystander.kill()
        bystander.wait()
