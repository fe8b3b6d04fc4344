"""Reads all keys of a run, so that tests can check that none has changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis

from grpo_api.store.redis import layout_prefix


def stored_keys(redis_url: str, run_id: str, without: tuple[str, ...]) -> dict[bytes, Any]:
    """Every key of the run with its content, independent of the order in hashes and sets.

    Args:
        without: prefixes of names to leave out, after the run's prefix.
    """
    prefix = layout_prefix(run_id)
    with redis.Redis.from_url(redis_url) as connection:
        return {
            key: _content(connection, key)
            for key in connection.keys(f"{prefix}*")
            if not key.decode().removeprefix(prefix).startswith(without)
        }


def _content(connection: redis.Redis, key: bytes) -> Any:
    # not DUMP, because the order of its hash fields changes while Redis resizes the hash
    kind = connection.type(key)
    if kind == b"hash":
        return connection.hgetall(key)
    if kind == b"set":
        return connection.smembers(key)
    if kind == b"zset":
        return connection.zrange(key, 0, -1, withscores=True)
    assert kind == b"string", kind
    return connection.get(key)


@contextmanager
def nothing_stored_changes(redis_url: str, run_id: str) -> Iterator[None]:
    """Assert that the block changes no key of a run, except receipts, reserved ids and the number
    of refused groups."""
    aside = ("receipt:", "last_group_id", "refusals")
    before = stored_keys(redis_url, run_id, aside)
    assert len(before) > 10
    yield
    assert stored_keys(redis_url, run_id, aside) == before
