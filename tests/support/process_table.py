"""Which processes live, by process id."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SLEEP = "import time; time.sleep(120)"


def is_alive(pid: int) -> bool:
    """A zombie counts as dead."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def eventually(condition: Callable[[], bool], deadline_s: float = 90.0) -> bool:
    give_up_at = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.02)
    return True


@contextmanager
def unrelated_process() -> Iterator[subprocess.Popen[bytes]]:
    """A bystander that no test may end."""
    bystander = subprocess.Popen([sys.executable, "-c", SLEEP])
    try:
        yield bystander
    finally:
        bystander.kill()
        bystander.wait()
