"""Runs a child process until it ends or reaches a limit, and keeps what it writes. What it uses is
read from `/proc` and from its directory."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

from grpo_core.process import children
from grpo_env.failures import is_of_machine
from grpo_env.sandbox.interface import Ended, Limits, Reason, SandboxFailed

_POLL_S = 0.1
_LARGEST_SHARE = 0.1
"""Of the time, that a measurement may take."""
_BY_STATUS: Mapping[int, Reason] = {
    128 + signal.SIGXCPU: "cpu",
    128 + signal.SIGXFSZ: "files",
}
_KIB = 1024
_BLOCK_BYTES = 512  # of st_blocks, whatever the file system
_SMALLEST_FILE_BYTES = 4096
"""An empty file takes space too, and time to measure."""


async def kill_session(pid: int) -> None:
    """The child and what it started, unless that has left its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


@dataclass(frozen=True)
class LimitedCommand:
    """A command with its limits.

    kill: ends the child, of this process id, and waits until nothing of it is left; directory:
    whose files count for `limits.file_bytes`; measures_memory: whether the memory of the child's
    processes counts for `limits.memory_bytes`; in_memory: where the child sees file systems in
    memory; inherited: file descriptors; prepare: called in the child before it starts.
    """

    argv: Sequence[str]
    environment: Mapping[str, str]
    limits: Limits
    kill: Callable[[int], Awaitable[None]] = kill_session
    stdin: bytes = b""
    directory: Path | None = None
    measures_memory: bool = True
    cwd: Path | None = None
    in_memory: Sequence[str] = ()
    inherited: Sequence[int] = ()
    prepare: Callable[[], None] | None = None


class _Run(asyncio.SubprocessProtocol):
    """One run. `reached` gets the first limit that stops it, or `finished`: the process has ended,
    and nothing holds its output open."""

    def __init__(self, output_bytes: int) -> None:
        loop = asyncio.get_running_loop()
        self.reached: asyncio.Future[Reason] = loop.create_future()
        self.exited = asyncio.Event()
        self._output_bytes = output_bytes
        self._written = {1: bytearray(), 2: bytearray()}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        written = self._written[fd]
        written.extend(data)
        if len(written) > self._output_bytes:
            del written[: -self._output_bytes]
            self.stop("output")

    def process_exited(self) -> None:
        self.exited.set()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's name
        self.stop("finished")

    def stop(self, reason: Reason | SandboxFailed) -> None:
        if self.reached.done():
            return
        if isinstance(reason, SandboxFailed):
            self.reached.set_exception(reason)
        else:
            self.reached.set_result(reason)

    def text(self, fd: int) -> str:
        return self._written[fd].decode(errors="replace")


async def run_child(command: LimitedCommand) -> Ended:
    """Run a command in a session of its own, to its end or to the first limit.

    Raises:
        OSError: the command does not start.
        SandboxFailed: the kernel ended it because memory ran out, or it cannot be measured.
    """
    files_before, out_of_memory = 0, _out_of_memory()
    if command.directory:
        with contextlib.suppress(OSError):  # it cannot be measured, which then stops the run
            files_before = await asyncio.to_thread(file_bytes, command.directory, math.inf)
    started = time.monotonic()
    loop = asyncio.get_running_loop()
    transport, run = await loop.subprocess_exec(
        lambda: _Run(command.limits.output_bytes),
        *command.argv,
        env=dict(command.environment),
        cwd=command.cwd,
        pass_fds=command.inherited,
        start_new_session=True,
        preexec_fn=command.prepare,
    )
    timer = loop.call_later(command.limits.seconds, run.stop, "timeout")
    measuring = asyncio.create_task(_measure(command, transport.get_pid(), files_before, run))
    try:
        stdin = cast(asyncio.WriteTransport, transport.get_pipe_transport(0))
        stdin.write(command.stdin)
        stdin.close()  # after what was written
        reason = await run.reached
    finally:
        timer.cancel()
        measuring.cancel()
        await asyncio.shield(_end(command, transport, run))
    code = cast(int, transport.get_returncode())
    status = 128 - code if code < 0 else code
    if reason == "finished":
        reason = _BY_STATUS.get(status, reason)
        is_killed = status == 128 + signal.SIGKILL and command.measures_memory
        if is_killed and _out_of_memory() > out_of_memory:
            raise SandboxFailed("the kernel ended the program: the machine ran out of memory")
    return Ended(status, run.text(1), run.text(2), reason, time.monotonic() - started)


async def _end(command: LimitedCommand, transport: asyncio.SubprocessTransport, run: _Run) -> None:
    await command.kill(transport.get_pid())
    await run.exited.wait()
    transport.close()


async def _measure(command: LimitedCommand, pid: int, files_before: int, run: _Run) -> None:
    async with asyncio.TaskGroup() as both:
        if command.measures_memory:
            most = command.limits.memory_bytes
            used = partial(memory_bytes, pid, command.in_memory)
            both.create_task(_watch("memory", used, most, run))
        if command.directory:
            most = files_before + command.limits.file_bytes
            used = partial(file_bytes, command.directory, most + 1)
            both.create_task(_watch("files", used, most, run))


async def _watch(reason: Reason, used: Callable[[], int], most: int, run: _Run) -> None:
    """Stop a run that uses more, or of which this cannot be measured."""
    try:
        while True:
            started = time.monotonic()
            if await asyncio.to_thread(used) > most:
                run.stop(reason)
            took = time.monotonic() - started
            await asyncio.sleep(max(_POLL_S, took / _LARGEST_SHARE))
    except OSError as error:
        run.stop(SandboxFailed(f"no measurement: {error}") if is_of_machine(error) else reason)


def _out_of_memory() -> int:
    """How often the kernel has ended a process because memory ran out, here or in a cgroup."""
    with contextlib.suppress(FileNotFoundError):  # where /proc shows processes only
        return int(Path("/proc/vmstat").read_text().partition("\noom_kill ")[2].split(None, 1)[0])
    return 0


def memory_bytes(pid: int, places: Sequence[str]) -> int:
    """Memory of a process and its descendants. A page that several share is counted once.

    Args:
        pid: of a process whose descendants may see file systems in memory
        places: where those are mounted. The kernel's memory for their files counts, their content
            does not.
    """
    processes = [pid]
    for one in processes:
        processes += children(one)
    own = sum(map(_own_bytes, processes))
    # A process that has ended sees none.
    return own + sum(max(_files(one, place) for one in processes) for place in places) * _KIB


def _own_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * _KIB


def _files(pid: int, place: str) -> int:
    """Opened once: while a process starts, the same path leads to different file systems."""
    try:
        inside = os.open(f"/proc/{pid}/root{place}", os.O_PATH)
        try:
            if os.fstat(inside).st_dev == os.stat(place).st_dev:  # it still starts
                return 0
            found = os.fstatvfs(inside)
        finally:
            os.close(inside)
    except OSError:  # it still starts, or has ended
        return 0
    return found.f_files - found.f_ffree


def file_bytes(directory: Path, enough: float) -> int:
    """Disk space of what is in a directory, counted until it is `enough`. Raises `OSError`: a
    directory cannot be read, or a path is too long."""
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
                with contextlib.suppress(FileNotFoundError):
                    blocks = entry.stat(follow_symlinks=False).st_blocks
                    yield max(blocks * _BLOCK_BYTES, _SMALLEST_FILE_BYTES)
