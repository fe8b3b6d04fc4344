"""Warns before the disk of Redis is full.

With `appendfsync always`, Redis ends at the first write for which the disk has no room, and after
each restart again, until there is room. It loses nothing that it acknowledged.
"""

from __future__ import annotations

import structlog
from redis.exceptions import ResponseError

from grpo_api.errors import StoreUnavailable
from grpo_api.http.shutdown import Lifetime
from grpo_api.store.redis import RedisLink

WARN_SHARE = 0.75
"""Above this part of the disk, the file that replaces the append-only file may not fit beside
it."""
POLL_S = 10.0

_log = structlog.get_logger()


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
