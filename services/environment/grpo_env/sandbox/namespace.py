"""The processes in the namespace that a `bwrap` makes: their limits, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from grpo_core.process import children
from grpo_env.sandbox.interface import Limits

_STATUS_BYTES = 4096


class Namespace:
    """The processes inside. The kernel ends them with their first one, which ends with `bwrap`;
    `bwrap` may end before them. All have the limits, which that first one gets before it starts
    the program.

    options: of `bwrap`, which inherits the file descriptors `inherited`.
    has_run: after `kill`, whether the program was started and ended by itself; has_begun: whether
    it ran until then.
    """

    has_run = has_begun = False

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._told = b""
        self._first: tuple[int, int] | None = None  # process and namespace, as on the host

    def __enter__(self) -> Self:
        self._reader, status = os.pipe()
        gate, self._opener = os.pipe()
        self.inherited = (status, gate)
        self.options = ("--json-status-fd", str(status), "--block-fd", str(gate))
        os.set_blocking(self._reader, False)
        asyncio.get_running_loop().add_reader(self._reader, self._read)
        return self

    def __exit__(self, *_error: object) -> None:
        asyncio.get_running_loop().remove_reader(self._reader)
        for fd in (self._reader, self._opener, *self.inherited):
            os.close(fd)

    def _read(self) -> None:
        """`bwrap` tells its first process in one line, and the end of the program in another."""
        with contextlib.suppress(BlockingIOError):
            self._told += os.read(self._reader, _STATUS_BYTES)
        first, *end = self._told.split(b"\n")
        if end and self._first is None:
            told = json.loads(first)
            self._first = told["child-pid"], told["pid-namespace"]
            with contextlib.suppress(ProcessLookupError):  # it has ended
                _limit(told["child-pid"], self._limits)
            os.write(self._opener, b"\n")
        self.has_run = len(end) > 1

    async def kill(self, bwrap: int) -> None:
        """Return when no process is left."""
        self._read()
        self.has_begun = bool(self._first and children(self._first[0]))
        # A `bwrap` that has just started has not told its child yet to end with it. The child is in
        # its process group until it starts the program.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(bwrap, signal.SIGKILL)
        self._read()
        if self._first:
            await _kill(*self._first)


def _limit(pid: int, limits: Limits) -> None:
    """Limit the process and all that it will start. RLIMIT_DATA, not RLIMIT_AS: programs such as
    node reserve much more than they use."""
    wanted: Mapping[int, tuple[int, int]] = {
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_CPU: (limits.cpu_s, limits.cpu_s + 1),
        resource.RLIMIT_DATA: (limits.memory_bytes, limits.memory_bytes),
        resource.RLIMIT_FSIZE: (limits.file_bytes, limits.file_bytes),
        resource.RLIMIT_NOFILE: (limits.open_files, limits.open_files),
        resource.RLIMIT_NPROC: (limits.processes, limits.processes),
    }
    for what, (soft, hard) in wanted.items():
        _, most = resource.prlimit(pid, what)
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.prlimit(pid, what, (soft, hard))


async def _kill(pid: int, namespace: int) -> None:
    """Return when the first process of the namespace has ended."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with contextlib.suppress(OSError):  # it is ending
            if Path(f"/proc/{pid}/ns/pid").stat().st_ino != namespace:
                return  # another process has this id now
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(process, ended.set)
        await ended.wait()
        loop.remove_reader(process)
    finally:
        os.close(process)
