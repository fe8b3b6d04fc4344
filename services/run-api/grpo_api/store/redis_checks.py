"""Checks Redis at the start, and warns before its disk is full.

With `appendfsync always`, Redis ends at the first write for which the disk has no room, and after
each restart again, until there is room. It loses nothing that it acknowledged.
"""

from __future__ import annotations

from typing import Any

import structlog
from redis.exceptions import ResponseError

from grpo_api.errors import StoreUnavailable, UnsuitableRedis
from grpo_api.store.redis import RedisLink
from grpo_api.waiting import Lifetime

WARN_SHARE = 0.75
"""Above this part of the disk, the file that replaces the append-only file may not fit beside
it."""
POLL_S = 10.0
_PERSISTENCE_RETRY_S = 5.0
_NO_EVICTION = "noeviction"

_log = structlog.get_logger()


async def check_redis(link: RedisLink, lifetime: Lifetime) -> None:
    """Log whether Redis answers, and whether it saves the run to disk, as far as it tells.

    Raises:
        UnsuitableRedis: Redis may evict keys of the run.
    """
    try:
        await link.ping()
    except (StoreUnavailable, ResponseError) as error:
        _log.warning(
            "redis.unreachable",
            redis=link.where,
            reason=str(error),
            hint="requests wait for Redis; start Redis, or check --redis-url",
        )
    memory: dict[str, Any] = await _told(link, lifetime, "INFO", "memory") or {}
    policy = memory.get("maxmemory_policy", _NO_EVICTION)
    if policy != _NO_EVICTION:
        raise UnsuitableRedis(
            f"Redis at {link.where} has maxmemory-policy {policy}, so it would delete "
            "receipts, groups or more of the run when its memory is full; set "
            f"maxmemory-policy {_NO_EVICTION} (redis-cli CONFIG SET maxmemory-policy "
            f"{_NO_EVICTION}, or the parameter of that name of a managed service)"
        )
    persistence: dict[str, Any] = await _told(link, lifetime, "INFO", "persistence") or {}
    match persistence.get("aof_enabled"):
        case 1:
            flat: list[bytes] = await _told(link, lifetime, "CONFIG", "GET", "appendfsync") or []
            appendfsync = flat[1].decode() if flat else "unknown: Redis rejects CONFIG"
            _log.info("redis.persistent", appendfsync=appendfsync)
        case 0:
            _log.warning(
                "redis.not_persistent",
                hint="a restart of Redis loses the run; start Redis with --appendonly yes",
            )


async def _told(link: RedisLink, lifetime: Lifetime, *command: str) -> Any:
    """The answer, however late Redis starts; None if Redis rejects the command, as managed services
    do, or if the server stops first."""
    while not lifetime.closing.is_set():
        try:
            return await link.call(*command)
        except ResponseError:
            break
        except StoreUnavailable:
            await lifetime.closes_within(_PERSISTENCE_RETRY_S)
    return None


async def watch_disk(
    link: RedisLink, lifetime: Lifetime, disk_bytes: int | None, poll_s: float = POLL_S
) -> None:
    """Log a warning each time that the append-only file gets too large, until the server stops.

    Args:
        disk_bytes: that Redis' files may take; None: unknown, nothing is watched
    """
    if disk_bytes is None:
        return
    was_large = False
    while not lifetime.closing.is_set():
        held = await _file_bytes(link)
        is_large = was_large if held is None else held > WARN_SHARE * disk_bytes
        if is_large and not was_large:
            _log.warning(
                "redis.disk_nearly_full",
                append_only_file_bytes=held,
                disk_bytes=disk_bytes,
                hint="Redis ends when its disk is full: enlarge the disk, or lower "
                "--max-queued-bytes and --max-leased-bytes",
            )
        was_large = is_large
        await lifetime.closes_within(poll_s)


async def _file_bytes(link: RedisLink) -> int | None:
    """None if Redis does not tell."""
    try:
        told = await link.call("INFO", "persistence")
    except (ResponseError, StoreUnavailable):
        return None
    return int(told.get("aof_current_size", 0))
