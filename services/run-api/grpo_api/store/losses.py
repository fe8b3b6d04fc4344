"""Finds groups that Redis has lost: this process confirmed them, but Redis started without them.

A Redis that is killed, or that a replica replaces, may start with older data, and every connection
to it is new. So each new connection first compares what this process remembers with what Redis had
at its start. The trainer finds batches that were lost: it remembers the newest one.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Any

import structlog
from redis.asyncio.connection import AbstractConnection

_REMEMBERED = 100_000
"""Groups. More than a Redis without persistence, which loses all, is likely to hold."""

_log = structlog.get_logger()


class ConfirmedGroups:
    """The newest groups that this process confirmed to their senders.

    Args:
        where: the Redis, for the log
        script, keys: `compare_start.lua`
    """

    def __init__(self, where: str, script: str, keys: list[str]) -> None:
        self._where = where
        self._command = ("EVAL", script, len(keys), *keys, os.urandom(8).hex())
        self._ids: deque[int] = deque(maxlen=_REMEMBERED)
        self._redis_process = b""
        self._unstored = 0

    def note(self, last_id: int, groups: int) -> None:
        """Remember groups with consecutive ids, which Redis has stored."""
        self._ids.extend(range(last_id - groups + 1, last_id + 1))

    async def compare(self, connection: AbstractConnection) -> None:
        """Begin a connection. If it is the first one to another Redis process, count the groups
        that this one lacks."""
        await connection.on_connect()
        process, had = await self._send(connection)
        if process == self._redis_process:
            return
        lost = sum(group_id > had for group_id in self._ids)
        self._ids.clear()
        self._redis_process = process
        if lost:
            self._unstored += lost
            _log.error(
                "redis.lost_groups",
                groups=lost,
                redis=self._where,
                hint="Redis started without groups that run-api had accepted. To lose none, run "
                "Redis with --appendonly yes --appendfsync always",
            )
            await self._send(connection)
            self._unstored = 0

    async def _send(self, connection: AbstractConnection) -> Any:
        await connection.send_command(*self._command, self._unstored)
        return await connection.read_response()
