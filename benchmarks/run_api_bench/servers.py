"""run-api and the API server of atroposlib, each started by its own command; their CPU time."""

from __future__ import annotations

import ctypes
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import psutil
import redis

from benchmarks.run_api_bench.connection import HOST, ApiBenchmarkFailed, Connection
from grpo_core.process import ManagedProcess
from grpo_runs.process.ports import free_port
from tests.compat.upstream_install import ensure_upstream
from tests.support.redis_server import start_redis

ATROPOSLIB_PINS = Path(__file__).parents[2] / "requirements" / "atroposlib-api.txt"
SystemName = Literal["atroposlib", "run-api"]
START_DEADLINE_S = 60.0
_PROBE_DEADLINE_S = 2.0
_LIBC = ctypes.CDLL(None)
_NS_PER_S = 1e9


@dataclass(frozen=True)
class CpuSeconds:
    """CPU time since the processes began. `redis` is 0 if there is none."""

    server: float
    redis: float

    @property
    def total(self) -> float:
        return self.server + self.redis

    def __sub__(self, earlier: CpuSeconds) -> CpuSeconds:
        return CpuSeconds(self.server - earlier.server, self.redis - earlier.redis)


@dataclass(frozen=True)
class RunningServer:
    """`redis_port`: of the Redis that only this server uses, with its process; 0 if there is
    none."""

    port: int
    process: ManagedProcess
    redis_port: int = 0
    redis_process: ManagedProcess | None = None

    def cpu(self) -> CpuSeconds:
        redis_s = cpu_seconds(self.redis_process.pid) if self.redis_process else 0.0
        return CpuSeconds(cpu_seconds(self.process.pid), redis_s)

    def rss_bytes(self) -> int:
        """Resident memory of the server with its children, and of Redis without the child that
        rewrites its file, because that shares its pages."""
        processes = _tree(psutil.Process(self.process.pid))
        if self.redis_process:
            processes.append(psutil.Process(self.redis_process.pid))
        return sum(process.memory_info().rss for process in processes)

    def forget_env_ids(self) -> None:
        """run-api assigns no env_id twice, also after a reset; the workload is of env_id 0."""
        if self.redis_port:
            with redis.Redis(HOST, self.redis_port, socket_timeout=_PROBE_DEADLINE_S) as client:
                for key in client.scan_iter("*:last_env_id"):
                    client.delete(key)

    def stop(self) -> None:
        self.process.stop()
        if self.redis_process:
            self.redis_process.stop()


@contextmanager
def running(name: SystemName) -> Iterator[RunningServer]:
    """The server with files of its own. A failure in the block shows the end of its log."""
    start: Callable[[Path], RunningServer] = SYSTEMS[name]
    with TemporaryDirectory(prefix="bench-run-api-") as directory:
        server = start(Path(directory))
        try:
            yield server
        except ApiBenchmarkFailed as error:
            error.add_note(f"{name} logged last:\n{server.process.log_tail()}")
            raise
        finally:
            server.stop()


def _start_atroposlib(directory: Path) -> RunningServer:
    """`run-api` of atroposlib 0.4.0, as published, in its own Python environment."""
    python, port = ensure_upstream(pins=ATROPOSLIB_PINS).python, free_port()
    command = [str(python), "-m", "atroposlib.cli.run_api", "--host", HOST, "--port", str(port)]
    process = ManagedProcess("atroposlib", command, directory / "atroposlib.log")
    _wait_until_it_answers(process, port, "/")
    return RunningServer(port, process)


def _start_run_api(directory: Path) -> RunningServer:
    """Our `run-api` with its defaults, on a Redis of its own."""
    redis_port, port = free_port(), free_port()
    redis_process = start_redis(redis_port, directory / "redis", of_host=True)
    try:
        command = [str(Path(sys.executable).with_name("run-api")), "--port", str(port)]
        command += ["--redis-url", f"redis://{HOST}:{redis_port}/0"]
        process = ManagedProcess("run-api", command, directory / "run-api.log")
        _wait_until_it_answers(process, port, "/health")
    except BaseException:
        redis_process.kill()
        raise
    return RunningServer(port, process, redis_port, redis_process)


SYSTEMS = {"atroposlib": _start_atroposlib, "run-api": _start_run_api}


def _wait_until_it_answers(process: ManagedProcess, port: int, path: str) -> None:
    try:
        process.wait_until(lambda: _answers(port, path), START_DEADLINE_S)
    except BaseException:
        process.kill()
        raise


def _answers(port: int, path: str) -> bool:
    with Connection(port, _PROBE_DEADLINE_S) as connection:
        try:
            connection.get(path)
        except ApiBenchmarkFailed:
            return False
        return True


def cpu_seconds(pid: int) -> float:
    """User and system time of the process, of all its descendants, and of those that have ended
    (clock_getcpuclockid(3): /proc/<pid>/stat has the same in steps of 10 ms)."""
    return sum(_own_cpu_seconds(process) for process in _tree(psutil.Process(pid)))


def core_wait_seconds(pid: int) -> float:
    """How long the first thread of the process was ready to run and had no core, since it began;
    NaN on kernels that do not count it (/proc/<pid>/schedstat, second field, in nanoseconds)."""
    try:
        fields = Path(f"/proc/{pid}/schedstat").read_text().split()
    except FileNotFoundError:
        return math.nan
    return int(fields[1]) / _NS_PER_S


def _tree(root: psutil.Process) -> list[psutil.Process]:
    return [root, *root.children(recursive=True)]


def _own_cpu_seconds(process: psutil.Process) -> float:
    try:
        ended = process.cpu_times()
        running_s = time.clock_gettime(_cpu_clock(process.pid))
    except (psutil.NoSuchProcess, ProcessLookupError):
        return 0.0  # it ended just now: its parent's count of ended children has it
    return running_s + ended.children_user + ended.children_system


def _cpu_clock(pid: int) -> int:
    clock = ctypes.c_int()
    status = _LIBC.clock_getcpuclockid(pid, ctypes.byref(clock))
    if status != 0:
        raise ProcessLookupError(status, os.strerror(status), pid)
    return clock.value
