"""Where on its host this process is, as far as two processes that share GPU memory must agree.

CUDA finds the exporting process by its number, so both need one PID namespace; torch counts users
of exported memory in files of /dev/shm, so both need one file system there. Containers have their
own of each unless told otherwise.
"""

from __future__ import annotations

import os
from pathlib import Path

_PID_NAMESPACE = Path("/proc/self/ns/pid")
_SHM = Path("/dev/shm")


def pid_namespace() -> int:
    """Number of this process's PID namespace (namespaces(7)); no other one has it meanwhile."""
    return _PID_NAMESPACE.stat().st_ino


def torch_build(version: str, cuda: str | None) -> str:
    """torch's version and CUDA version as one text: both sides must write it alike."""
    return f"{version} with CUDA {cuda}"


def shm_filesystem() -> int:
    """Number of the file system at /dev/shm; 0 where there is none."""
    try:
        return os.stat(_SHM).st_dev
    except OSError:
        return 0
