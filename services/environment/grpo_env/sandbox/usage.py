"""What a process and its descendants use now, read from `/proc` and from their directory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_KIB = 1024
_BLOCK_BYTES = 512  # of st_blocks, whatever the file system


def memory_bytes(pid: int) -> int:
    """Memory of a process and its descendants. A page that several share is counted once."""
    return sum(_own_bytes(one) for one in _with_descendants(pid))


def _with_descendants(pid: int) -> Iterator[int]:
    yield pid
    try:
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it has ended
        return
    for child in " ".join(lists).split():
        yield from _with_descendants(int(child))


def _own_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * _KIB


def kernel_bytes(pid: int, places: Sequence[str]) -> int:
    """Memory of the kernel for the files in file systems in memory, without their content.

    Args:
        pid: of a process whose last descendant sees these file systems
        places: where they are mounted
    """
    *_, inside = _with_descendants(pid)
    return sum(_files(f"/proc/{inside}/root{place}", place) for place in places) * _KIB


def _files(inside: str, outside: str) -> int:
    try:
        if os.stat(inside).st_dev == os.stat(outside).st_dev:  # it still starts
            return 0
        found = os.statvfs(inside)
    except OSError:  # it still starts, or has ended
        return 0
    return found.f_files - found.f_ffree


def file_bytes(directory: Path | None) -> int:
    """Disk space of the files in a directory."""
    if directory is None:
        return 0
    return sum(_blocks(parent, name) for parent, _, names in os.walk(directory) for name in names)


def _blocks(parent: str, name: str) -> int:
    try:
        return os.lstat(os.path.join(parent, name)).st_blocks * _BLOCK_BYTES
    except FileNotFoundError:  # removed meanwhile
        return 0
