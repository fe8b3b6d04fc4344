"""What a process and its descendants use now, read from `/proc` and from their directory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_KIB = 1024
_BLOCK_BYTES = 512  # of st_blocks, whatever the file system
_SMALLEST_FILE_BYTES = 4096
"""An empty file takes space too, and time to measure."""


def memory_bytes(pid: int, places: Sequence[str]) -> int:
    """Memory of a process and its descendants. A page that several share is counted once.

    Args:
        pid: of a process whose descendants may see file systems in memory
        places: where those are mounted. The kernel's memory for their files counts, their content
            does not.
    """
    processes = _with_descendants(pid)
    own = sum(map(_own_bytes, processes))
    # A process that has ended sees none.
    return own + sum(max(_files(one, place) for one in processes) for place in places) * _KIB


def _with_descendants(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        found += _children(one)
    return found


def _children(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # the thread has ended
                yield from map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())


def _own_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * _KIB


def _files(pid: int, place: str) -> int:
    """Opened once: while a process starts, the same path leads to different file systems."""
    try:
        with _opened(f"/proc/{pid}/root{place}") as inside:
            if os.fstat(inside).st_dev == os.stat(place).st_dev:  # it still starts
                return 0
            found = os.fstatvfs(inside)
    except OSError:  # it still starts, or has ended
        return 0
    return found.f_files - found.f_ffree


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    opened = os.open(path, os.O_PATH)
    try:
        yield opened
    finally:
        os.close(opened)


def file_bytes(directory: Path, enough: float) -> int:
    """Disk space of what is in a directory, counted until it is `enough`.

    Raises:
        OSError: a directory cannot be read, or a path is too long.
    """
    found = 0
    for size in _sizes(directory):
        found += size
        if found >= enough:
            break
    return found


def _sizes(directory: Path) -> Iterator[int]:
    left = [str(directory)]
    while left:
        # What is removed or replaced meanwhile does not count.
        gone = contextlib.suppress(FileNotFoundError, NotADirectoryError)
        with gone, os.scandir(left.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    left.append(entry.path)
                yield _size(entry)


def _size(entry: os.DirEntry[str]) -> int:
    try:
        blocks = entry.stat(follow_symlinks=False).st_blocks
    except FileNotFoundError:  # removed meanwhile
        return 0
    return max(blocks * _BLOCK_BYTES, _SMALLEST_FILE_BYTES)
