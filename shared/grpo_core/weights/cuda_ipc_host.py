"""Reads the properties that must be equal in two processes that share GPU memory.

CUDA finds the exporting process by its process id, so both need the same PID namespace. torch
counts the users of exported memory in files in /dev/shm, so both need the same file system there.
By default every container has its own PID namespace and its own /dev/shm.
"""

from __future__ import annotations

import os
from pathlib import Path

_PID_NAMESPACE = Path("/proc/self/ns/pid")
_SHM = Path("/dev/shm")


def pid_namespace() -> int:
    """Number of this process's PID namespace (namespaces(7)), unique while that exists."""
    return _PID_NAMESPACE.stat().st_ino


def torch_build(version: str, cuda: str | None) -> str:
    """torch's version and CUDA version as one text, which both processes compare."""
    return f"{version} with CUDA {cuda}"


def shm_filesystem() -> int:
    """Number of the file system at /dev/shm; 0 if there is none."""
    try:
        return os.stat(_SHM).st_dev
    except OSError:
        return 0
