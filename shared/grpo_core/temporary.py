"""Temporary directories that do not outlive a killed process for long."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "grpo-tmp-"


@contextlib.contextmanager
def temporary_directory() -> Iterator[Path]:
    """A directory below $TMPDIR, locked until it is removed at the end of the block. The first one
    of a process removes those of killed processes, whose locks have ended with them."""
    parent = Path(tempfile.gettempdir())
    _remove_left(parent)
    made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # of a file system without locks, where nobody removes
            stack.enter_context(_locked(made))  # before its name is one that others remove
        path = made.rename(parent / made.name[1:])
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


@functools.cache
def _remove_left(parent: Path) -> None:
    for left in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _locked(left):
            shutil.rmtree(left)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Raises `BlockingIOError`: another process holds the lock."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
