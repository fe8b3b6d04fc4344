"""Checks Redis at the start, and warns before its disk is full.

With `appendfsync always`, Redis ends at the first write for which the disk has no room, and after
each restart again, until there is room. It loses nothing that it acknowledged.
"""

from __future__ import annotations

import asyncio
from typing import Any

import structlog
from redis.exceptions import ResponseError

from grpo_api.errors import StoreUnavailable, UnsuitableRedis
from grpo_api.store.redis import LAYOUT, RedisLink, layout_prefix
from grpo_core.alerts import REDIS_DISK_SHARE
from grpo_core.redis.server import APPENDFSYNC

_LATER_LAYOUTS = 10
"""Layouts of later releases that this one looks for, so that it names a run that was begun with
one of them."""
_POLL_S = 10.0
_PERSISTENCE_RETRY_S = 5.0
_NO_EVICTION = "noeviction"

log = structlog.get_logger()


async def check_redis(link: RedisLink) -> None:
    """Log whether Redis answers, and whether it saves the run to disk, as far as it tells.

    Raises:
        UnsuitableRedis: Redis may evict keys of the run, or has the run in another layout.
    """
    try:
        await link.ping()
    except (StoreUnavailable, ResponseError) as error:
        log.warning(
            "redis.unreachable",
            redis=link.where,
            reason=str(error),
            hint="requests wait for Redis; start Redis, or check --redis-url",
        )
    memory: dict[str, Any] = await _told(link, "INFO", "memory") or {}
    policy = memory.get("maxmemory_policy", _NO_EVICTION)
    if policy != _NO_EVICTION:
        raise UnsuitableRedis(
            f"Redis at {link.where} has maxmemory-policy {policy}, so it would delete "
            "receipts, groups or more of the run when its memory is full; set "
            f"maxmemory-policy {_NO_EVICTION} (redis-cli CONFIG SET maxmemory-policy "
            f"{_NO_EVICTION}, or the parameter of that name of a managed service)"
        )
    await _require_own_layout(link)
    persistence: dict[str, Any] = await _told(link, "INFO", "persistence") or {}
    match persistence.get("aof_enabled"):
        case 1:
            flat: list[bytes] = await _told(link, "CONFIG", "GET", "appendfsync") or []
            appendfsync = flat[1].decode() if flat else "unknown: Redis rejects CONFIG"
            if not flat or appendfsync == APPENDFSYNC:
                log.info("redis.persistent", appendfsync=appendfsync)
            else:
                log.warning(
                    "redis.may_lose_groups",
                    appendfsync=appendfsync,
                    hint=f"a killed Redis may lose groups; use --appendfsync {APPENDFSYNC}",
                )
        case 0:
            log.warning(
                "redis.not_persistent",
                hint="a restart of Redis loses the run; start Redis with --appendonly yes",
            )


async def _require_own_layout(link: RedisLink) -> None:
    for layout in range(1, LAYOUT + _LATER_LAYOUTS):
        key = layout_prefix(link.run_id, layout) + "trainer"
        if layout != LAYOUT and await _told(link, "EXISTS", key):
            raise UnsuitableRedis(
                f"Redis at {link.where} has run {link.run_id} in layout {layout}, which another "
                f"release of run-api wrote; this one has layout {LAYOUT}. Continue the run with "
                "that release, or start a new one with another --run-id. To delete the old run, "
                "call GET /reset_data of that release"
            )


async def _told(link: RedisLink, *command: str) -> Any:
    """The answer, however late Redis starts; None if Redis rejects the command, as managed services
    do."""
    while True:
        try:
            return await link.call(*command)
        except ResponseError:
            return None
        except StoreUnavailable:
            await asyncio.sleep(_PERSISTENCE_RETRY_S)


async def watch_disk(link: RedisLink, disk_bytes: int | None, poll_s: float = _POLL_S) -> None:
    """Log a warning each time that the append-only file gets too large, until cancelled.

    Args:
        disk_bytes: that Redis' files may take; None: unknown, nothing is watched
    """
    if disk_bytes is None:
        return
    was_large = False
    while True:
        try:
            held = await link.append_only_file_bytes()
        except StoreUnavailable:
            held = None
        is_large = was_large if held is None else held > REDIS_DISK_SHARE * disk_bytes
        if is_large and not was_large:
            log.warning(
                "redis.disk_nearly_full",
                append_only_file_bytes=held,
                disk_bytes=disk_bytes,
                hint="enlarge the disk, or lower --max-queued-bytes and --max-leased-bytes",
            )
        was_large = is_large
        await asyncio.sleep(poll_s)
