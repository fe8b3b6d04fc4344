"""Measures the highest memory of each service, its child processes included."""

from __future__ import annotations

import time
from collections.abc import Mapping

import psutil

SAMPLE_EVERY_S = 5.0
"""A sample takes a tenth of a second of CPU time."""
MIB = 2**20


class MemoryPeaks:
    """The highest memory of each service in bytes, sampled every few seconds.

    It is the proportional set size: a page that n processes map counts 1/n in each. So weights that
    server and trainer share are not counted twice. If the kernel does not give it, the resident set
    size is used.
    """

    def __init__(self) -> None:
        self.peak_bytes: dict[str, int] = {}
        self._next_at = 0.0
        self._watched: frozenset[str] = frozenset()

    def watch(self, pids: Mapping[str, int]) -> None:
        """Take a sample if one is due. Call it often.

        A sample is also due when a service has started or ended, so that short runs have some.

        Args:
            pids: process ids by service
        """
        watched = frozenset(pids)
        if watched == self._watched and time.monotonic() < self._next_at:
            return
        self._watched = watched
        for name, pid in pids.items():
            self.peak_bytes[name] = max(self.peak_bytes.get(name, 0), tree_bytes(pid))
        self._next_at = time.monotonic() + SAMPLE_EVERY_S


def tree_bytes(pid: int) -> int:
    """Memory of a process and its descendants; 0 if it has ended."""
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
