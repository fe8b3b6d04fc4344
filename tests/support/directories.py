"""Lists a directory's files, and simulates a full disk."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def names(directory: Path) -> list[str]:
    """Hidden files are included."""
    return sorted(path.name for path in directory.iterdir())


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """Make the kernel refuse to enlarge any file, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
