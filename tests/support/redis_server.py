"""Runs a `redis-server` in its own process."""

from __future__ import annotations

from pathlib import Path

from grpo_core.process import ManagedProcess
from grpo_core.redis.server import REDIS_DEADLINE_S, answers_ping, bundled_redis, redis_command


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
