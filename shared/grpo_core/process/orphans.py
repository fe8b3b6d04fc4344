"""Ends child processes with their parent, and adopts orphaned grandchildren to end them too.

`killpg` does not reach a grandchild in its own session. While this process is a child subreaper
(`prctl(2)`), it becomes the parent of such orphans instead of init. A child's process id cannot be
reused before its parent has reaped it.
"""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)
"""Loaded before any fork, because a forked child of a threaded process must not load code."""


def end_with_parent() -> None:
    """A `preexec_fn`: the kernel sends the child SIGTERM when its parent ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def killed_with_parent() -> None:
    """A `preexec_fn`: the kernel sends the child SIGKILL when its parent ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> frozenset[int]:
    """Become the parent of every orphaned descendant from now on.

    Returns the present children of this process, which `end_orphans` must spare.
    """
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    return children()


def stop_adopting() -> None:
    """Let init adopt later orphans again."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0)


def end_orphans(spare: frozenset[int]) -> None:
    """Kill and reap every child except `spare`, and the orphans that their end creates."""
    while orphans := children() - spare:
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def children() -> frozenset[int]:
    """Process ids of this process's direct children, zombies included."""
    lists = Path("/proc/self/task").glob("*/children")  # one list per thread that forked
    return frozenset(int(pid) for task in lists for pid in task.read_text().split())
