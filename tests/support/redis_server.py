"""Runs a `redis-server` in its own process."""

from __future__ import annotations

from pathlib import Path

import redis

from grpo_core.process import ManagedProcess
from grpo_core.redis.server import REDIS_DEADLINE_S, answers_ping, bundled_redis, redis_command
from grpo_runs.process.ports import free_port
from tests.support.wait import DEADLINE_S


def start_redis(
    port: int, directory: Path, appendfsync: str = "always", *, of_host: bool = False
) -> ManagedProcess:
    """Start the command of `redis_command`: of Redis 6.2, or of the Redis that the host has.

    Raises:
        ProcessFailed: it did not answer PING within a minute.
    """
    directory.mkdir(parents=True, exist_ok=True)
    binary = None if of_host else bundled_redis()
    command = redis_command(port, directory, binary, appendfsync, disabled=())
    process = ManagedProcess("redis", command, directory / "redis.log")
    try:
        process.wait_until(lambda: answers_ping(port), deadline_s=REDIS_DEADLINE_S)
    except BaseException:
        process.kill()
        raise
    return process


class OwnRedis:
    """Of some tests alone. It starts again with the same port and files."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.port = directory, free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.admin = redis.Redis.from_url(self.url, socket_timeout=DEADLINE_S)
        self.start()

    def start(self) -> None:
        self.process = start_redis(self.port, self.directory)
