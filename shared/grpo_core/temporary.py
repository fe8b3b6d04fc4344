"""Temporary directories that do not outlive a killed process for long."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "grpo-tmp-"


@contextlib.contextmanager
def temporary_directory() -> Iterator[Path]:
    """A directory below $TMPDIR, locked until it is removed at the end of the block. Those of
    killed processes, whose locks have ended with them, are removed at the start."""
    parent = Path(tempfile.gettempdir())
    for left in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _locked(left):
            shutil.rmtree(left)
    made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))
    with _locked(made):  # before its name is one that others remove
        path = made.rename(parent / made.name[1:])
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Raises `BlockingIOError`: another process holds the lock."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
