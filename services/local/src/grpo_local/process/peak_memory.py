"""How much memory each service takes at most, every process below it included."""

from __future__ import annotations

import time
from collections.abc import Mapping

import psutil

SAMPLE_EVERY_S = 5.0
"""A sample of a run costs the kernel a tenth of a second of a core."""
MIB = 2**20


class MemoryPeaks:
    """The highest sum over each service's process tree, in bytes, sampled every few seconds.

    Counted is the proportional set size: a page that several processes map counts once in all, so
    that weights which server and trainer share are not counted twice. Where the kernel does not
    tell, the resident set size.
    """

    def __init__(self) -> None:
        self.peak_bytes: dict[str, int] = {}
        self._next_at = 0.0
        self._watched: frozenset[str] = frozenset()

    def watch(self, pids: Mapping[str, int]) -> None:
        """Args: pids: of the services by name. May be called as often as one likes.

        A sample is taken when it is time and whenever a service has joined or left, so that even a
        short run has measured the services that were ready before its last one started.
        """
        watched = frozenset(pids)
        if watched == self._watched and time.monotonic() < self._next_at:
            return
        self._watched = watched
        for name, pid in pids.items():
            self.peak_bytes[name] = max(self.peak_bytes.get(name, 0), tree_bytes(pid))
        self._next_at = time.monotonic() + SAMPLE_EVERY_S


def tree_bytes(pid: int) -> int:
    """Of a process and all its descendants now; those that are gone count nothing."""
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    return sum(_process_bytes(process) for process in family)


def _process_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.AccessDenied:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:  # a zombie has no memory either
        return 0
