"""The two servers that are compared, each started as its own command starts it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import redis

from benchmarks.run_api_bench.connection import HOST, Connection
from benchmarks.run_api_bench.errors import ApiBenchmarkFailed
from benchmarks.run_api_bench.process_tree import cpu_seconds, rss_bytes
from benchmarks.run_api_bench.settings import SystemName
from grpo_core.process import ManagedProcess
from grpo_runs.process.ports import free_port
from tests.compat.upstream_install import ensure_upstream
from tests.support.redis_server import start_redis

ATROPOSLIB_PINS = Path(__file__).parents[2] / "requirements" / "atroposlib-api.txt"
START_DEADLINE_S = 60.0
_PROBE_DEADLINE_S = 2.0
_REWRITE_DEADLINE_S = 60.0
_REWRITE_POLL_S = 0.1


@dataclass(frozen=True)
class CpuSeconds:
    """Since the processes began. `redis` is 0 where there is none."""

    server: float
    redis: float

    @property
    def total(self) -> float:
        return self.server + self.redis

    def __sub__(self, earlier: CpuSeconds) -> CpuSeconds:
        return CpuSeconds(self.server - earlier.server, self.redis - earlier.redis)


@dataclass(frozen=True)
class RedisServer:
    """A real Redis with its append-only file, used by one run-api alone."""

    port: int
    process: ManagedProcess

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    def forget_env_ids(self) -> None:
        """run-api gives no env_id twice, also not after a reset; the workload is of env_id 0."""
        with redis.Redis(host=HOST, port=self.port, socket_timeout=_PROBE_DEADLINE_S) as client:
            for key in client.scan_iter("*:last_env_id"):
                client.delete(key)

    def rss_bytes(self) -> int:
        """Of the server alone, once it does not rewrite its file: until then it buffers what is
        written meanwhile, and the child that rewrites shares its pages."""
        give_up_at = time.monotonic() + _REWRITE_DEADLINE_S
        with redis.Redis(host=HOST, port=self.port, socket_timeout=_PROBE_DEADLINE_S) as client:
            while any(
                client.info("persistence")[key]
                for key in ("aof_rewrite_in_progress", "aof_rewrite_scheduled")
            ):
                if time.monotonic() > give_up_at:
                    raise ApiBenchmarkFailed("Redis still rewrites its append-only file after 60 s")
                time.sleep(_REWRITE_POLL_S)
            return int(client.info("memory")["used_memory_rss"])


@dataclass(frozen=True)
class RunningServer:
    port: int
    process: ManagedProcess
    redis: RedisServer | None = None

    def cpu(self) -> CpuSeconds:
        redis_s = cpu_seconds(self.redis.process.pid) if self.redis else 0.0
        return CpuSeconds(cpu_seconds(self.process.pid), redis_s)

    def forget_env_ids(self) -> None:
        if self.redis:
            self.redis.forget_env_ids()

    def rss_bytes(self) -> int:
        """Of the server with its children, and of Redis."""
        redis_bytes = self.redis.rss_bytes() if self.redis else 0
        return rss_bytes(self.process.pid) + redis_bytes

    def stop(self) -> None:
        try:
            self.process.stop()
        finally:
            if self.redis:
                self.redis.process.stop()


@dataclass(frozen=True)
class System:
    """How one of the two is started, with its files in a given directory."""

    name: SystemName
    start: Callable[[Path], RunningServer]

    @contextmanager
    def running(self) -> Iterator[RunningServer]:
        """The server, alone on this machine as far as the benchmark goes, until the block ends.

        Errors inside carry the end of the server's log, since the log goes with the directory.
        """
        with TemporaryDirectory(prefix="bench-run-api-") as directory:
            server = self.start(Path(directory))
            try:
                yield server
            except ApiBenchmarkFailed as error:
                error.add_note(f"{self.name} logged last:\n{server.process.log_tail()}")
                raise
            finally:
                server.stop()


def start_atroposlib(directory: Path) -> RunningServer:
    """`run-api` of atroposlib 0.4.0, as published, in its own Python environment."""
    python = ensure_upstream(pins=ATROPOSLIB_PINS).python
    port = free_port()
    options = ("--host", HOST, "--port", str(port))
    command = [str(python), "-m", "atroposlib.cli.run_api", *options]
    process = ManagedProcess("atroposlib", command, directory / "atroposlib.log")
    _wait_until_it_answers(process, port, "/")
    return RunningServer(port, process)


def start_run_api(directory: Path, appendfsync: str = "always") -> RunningServer:
    """Our `run-api` with its defaults, on a Redis of its own."""
    redis_port = free_port()
    process = start_redis(redis_port, directory / "redis", appendfsync, of_host=True)
    redis_server = RedisServer(redis_port, process)
    try:
        port = free_port()
        command = [str(Path(sys.executable).with_name("run-api"))]
        options = ["--port", str(port), "--redis-url", redis_server.url]
        process = ManagedProcess("run-api", [*command, *options], directory / "run-api.log")
        _wait_until_it_answers(process, port, "/health")
    except BaseException:
        redis_server.process.kill()
        raise
    return RunningServer(port, process, redis_server)


SYSTEMS = (System("atroposlib", start_atroposlib), System("run-api", start_run_api))


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
