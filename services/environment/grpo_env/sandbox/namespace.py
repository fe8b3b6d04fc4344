"""Ends the processes in the namespace that a `bwrap` made, and waits until none is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Self

_STATUS_BYTES = 4096


class Namespace:
    """The processes inside. The kernel ends them with their first one, which ends with `bwrap`;
    `bwrap` may end before them.

    writer: the file descriptor for its option `--json-status-fd`.
    has_run: after `kill`, whether the program was started and ended by itself.
    """

    has_run = False

    def __enter__(self) -> Self:
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        return self

    def __exit__(self, *_error: object) -> None:
        os.close(self._reader)
        os.close(self.writer)

    async def kill(self, bwrap: int) -> None:
        """Return when no process is left."""
        # A `bwrap` that has just started has not told its child yet to end with it.
        for pid in (*_children(bwrap), bwrap):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            first, *end = map(json.loads, os.read(self._reader, _STATUS_BYTES).splitlines())
            self.has_run = bool(end)
            process = os.pidfd_open(first["child-pid"])
        except (BlockingIOError, ProcessLookupError):  # never started, or gone
            return
        try:
            if _has_namespace(first["child-pid"], first["pid-namespace"]):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                await _ended(process)
        finally:
            os.close(process)


def _children(pid: int) -> list[int]:
    try:
        return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    except OSError:  # it has ended
        return []


def _has_namespace(pid: int, namespace: int) -> bool:
    """False: another process has this id now."""
    try:
        return Path(f"/proc/{pid}/ns/pid").stat().st_ino == namespace
    except OSError:  # it is ending
        return True


async def _ended(process: int) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(process, ended.set)
    await ended.wait()
    loop.remove_reader(process)
