"""Child processes: ended with their parent, and adopted when their own parent is gone.

A grandchild in a session of its own is out of reach of its grandparent's `killpg`. While this
process is a child subreaper (`prctl(2)`), the kernel hands such orphans to it instead of to init,
and a child's process id cannot pass to a stranger before its parent has reaped it.
"""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)
"""Loaded before any fork: a child of a process with threads must not load anything."""


def end_with_parent() -> None:
    """In a child, as `preexec_fn`: the kernel sends SIGTERM when the parent ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def killed_with_parent() -> None:
    """The same with SIGKILL."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> frozenset[int]:
    """Become the parent of every orphaned descendant from now on.

    Returns the children that this process has already, which are not ours to end.
    """
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    return children()


def stop_adopting() -> None:
    """Leave the next orphans to init again."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0)


def end_orphans(spare: frozenset[int]) -> None:
    """Kill and reap every child but `spare`, and whatever their death hands over."""
    while orphans := children() - spare:
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def children() -> frozenset[int]:
    """Process ids of this process's direct children, zombies included."""
    lists = Path("/proc/self/task").glob("*/children")  # one list per thread that forked
    return frozenset(int(pid) for task in lists for pid in task.read_text().split())
