"""What a process and all processes under it cost, as Linux counts it."""

from __future__ import annotations

import ctypes
import math
import os
import time
from pathlib import Path

import psutil

_LIBC = ctypes.CDLL(None)
_NS_PER_S = 1e9


def cpu_seconds(pid: int) -> float:
    """User and system time of the process, of every process that lives under it, and of those
    that ended there (clock_getcpuclockid(3): /proc/<pid>/stat says the same in steps of 10 ms).
    """
    root = psutil.Process(pid)
    return sum(_own_cpu_seconds(process) for process in [root, *root.children(recursive=True)])


def rss_bytes(pid: int) -> int:
    """Resident memory of the process and of every process that lives under it."""
    root = psutil.Process(pid)
    return sum(_own_rss_bytes(process) for process in [root, *root.children(recursive=True)])


def core_wait_seconds(pid: int) -> float:
    """How long the process' first thread was ready to run and had no core, since it began; NaN
    on kernels that do not count it (/proc/<pid>/schedstat, second field, in nanoseconds)."""
    try:
        fields = Path(f"/proc/{pid}/schedstat").read_text().split()
    except FileNotFoundError:
        return math.nan
    return int(fields[1]) / _NS_PER_S


def _own_cpu_seconds(process: psutil.Process) -> float:
    try:
        ended = process.cpu_times()
        running_s = time.clock_gettime(_cpu_clock(process.pid))
    except (psutil.NoSuchProcess, ProcessLookupError):
        return 0.0  # it ended just now: its parent's count of ended children has it
    return running_s + ended.children_user + ended.children_system


def _own_rss_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def _cpu_clock(pid: int) -> int:
    clock = ctypes.c_int()
    status = _LIBC.clock_getcpuclockid(pid, ctypes.byref(clock))
    if status != 0:
        raise ProcessLookupError(status, os.strerror(status), pid)
    return clock.value
