"""Faults of the host: disks and memory. Only in a mount namespace of its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.whole_run.matrix.network import run

CGROUPS = Path("/sys/fs/cgroup")
"""Of version 1, which has a directory for each controller."""


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[None]:
    """A tmpfs at this directory."""
    place.mkdir(parents=True, exist_ok=True)
    run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place))
    try:
        yield
    finally:
        run("umount", "--lazy", str(place))


@contextmanager
def loop_disk(place: Path, size: str, image: Path) -> Iterator[None]:
    """A file system of its own, on a block device, at this directory."""
    place.mkdir(parents=True, exist_ok=True)
    run("truncate", "--size", size, str(image))
    run("mkfs.ext4", "-q", str(image))
    run("mount", "-o", "loop,errors=remount-ro", str(image), str(place))
    try:
        yield
    finally:
        run("umount", "--lazy", str(place))


@contextmanager
def filled(place: Path) -> Iterator[None]:
    """The disk of this directory has no room. What others delete meanwhile is filled too."""
    ballast = place / "ballast"
    try:
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(2**16))
        with ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x")
        yield
    finally:
        ballast.unlink()


def report_error(place: Path) -> None:
    """The kernel meets an error in the file system of a `loop_disk`, which it then only reads."""
    device = run("findmnt", "--noheadings", "--output", "SOURCE", str(place)).strip()
    Path("/sys/fs/ext4", Path(device).name, "trigger_fs_error").write_text("1")


@contextmanager
def _cgroup(controller: str, pid: int) -> Iterator[Path]:
    """A group with this process; it leaves the group at the end, if it still lives."""
    top = CGROUPS / controller
    group = top / f"grpo-faults-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(str(pid))
        yield group
    finally:
        for left in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (top / "cgroup.procs").write_text(left)
        group.rmdir()


@contextmanager
def throttled(pid: int, place: Path, bytes_per_s: int) -> Iterator[None]:
    """What the process writes to the disk of this directory is as slow as this."""
    device = place.stat().st_dev
    with _cgroup("blkio", pid) as group:
        rule = f"{os.major(device)}:{os.minor(device)} {bytes_per_s}"
        (group / "blkio.throttle.write_bps_device").write_text(rule)
        yield


@contextmanager
def starved(pid: int) -> Iterator[None]:
    """The process gets no more than 1 MiB beside what it has."""
    with _cgroup("memory", pid) as group:
        (group / "memory.limit_in_bytes").write_text(str(2**20))
        yield
