"""Runs a command of the user in this process, and requires that it fails in words if at all."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

STATUSES = (0, 1, 2)


@dataclass(frozen=True)
class Told:
    """What a command wrote, and its exit status."""

    status: int
    out: str
    err: str


def told(main: Callable[[], object], words: Sequence[object]) -> Told:
    """Any exception but `SystemExit` would be a traceback for the user."""
    out, err = io.StringIO(), io.StringIO()
    status: object = 0
    with (
        mock.patch.object(sys, "argv", ["command", *map(str, words)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as ended:
            status = ended.code or 0
    found = Told(status if isinstance(status, int) else -1, out.getvalue(), err.getvalue())
    assert found.status in STATUSES, found
    assert "Traceback" not in found.err, found.err
    if found.status == 2:
        assert found.err.strip(), "it ends without a reason"
    return found


@contextlib.contextmanager
def nothing_left(directory: Path, *written: str) -> Iterator[None]:
    """The directory has the same files afterwards, and this process the same open files.

    Args: written: names of files that the command writes
    """
    names, open_files = _names(directory), _open_files()
    yield
    new = _names(directory) - names
    for name in new:
        (directory / name).unlink()
    left = [name for name in new if Path(name).name not in written]
    assert not left, f"left behind: {left}"
    assert _open_files() <= open_files, "left open"


def _names(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


def _open_files() -> set[str]:
    """Files and directories alone: sockets and pipes belong to the test runner."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if (name := os.readlink(link)).startswith("/") and not name.startswith("/proc"):
                found.add(name)
    return found
