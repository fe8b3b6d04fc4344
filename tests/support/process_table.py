"""Tells which processes are alive, by process id."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SLEEP = "import time; time.sleep(600)"


def is_alive(pid: int) -> bool:
    """A zombie counts as dead."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@contextmanager
def unrelated_process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that no test may end."""
    bystander = subprocess.Popen([sys.executable, "-c", SLEEP])
    try:
        yield bystander
    finally:
        bystander.kill()
        bystander.wait()
