"""What lies in Redis, for tests that nothing of it was touched."""

from __future__ import annotations

import redis

from grpo_core.redis_names import run_prefix


def stored_keys(redis_url: str, run_id: str, without: tuple[str, ...]) -> dict[bytes, bytes]:
    """Every key of the run and what it holds, byte for byte.

    Args:
        without: beginnings of names that are left out, without the run's prefix.
    """
    prefix = run_prefix(run_id)
    with redis.Redis.from_url(redis_url) as connection:
        return {
            key: connection.dump(key)
            for key in connection.keys(f"{prefix}*")
            if not key.decode().removeprefix(prefix).startswith(without)
        }
