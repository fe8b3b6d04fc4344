"""Stored groups as bytes. What is large goes in and out piece by piece: one long command would keep
everybody else waiting in Redis.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence

from grpo_api.redis_link import RedisLink
from grpo_api.store.keys import RECEIPT_S, keys

_PIECE_BYTES = 512 * 1024


class PayloadStore:
    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self.staged_prefix = f"{link.prefix}staged:"

    async def stage(self, payloads: Sequence[bytes]) -> list[str]:
        """Store payloads ahead of the script that queues them, which takes them by these names.

        What is not queued within `RECEIPT_S` seconds is forgotten.
        """
        return [await self._stage(payload) for payload in payloads]

    async def _stage(self, payload: bytes) -> str:
        name = os.urandom(16).hex()
        key = f"{self.staged_prefix}{name}"
        await self._link.call("SET", key, payload[:_PIECE_BYTES], "EX", RECEIPT_S)
        for at in range(_PIECE_BYTES, len(payload), _PIECE_BYTES):
            # by place, unlike APPEND: repeated after a lost answer it changes nothing
            await self._link.call("SETRANGE", key, at, payload[at : at + _PIECE_BYTES])
        return name

    async def load(self, group_ids: Sequence[int]) -> AsyncIterator[bytes | None]:
        """Stored groups, in this order; None for one that is not there any more."""
        payloads, large = keys(self._link, "payloads", "large")
        found, staged = await self._link.transaction(
            ("HMGET", payloads, *group_ids), ("HMGET", large, *group_ids)
        )
        for payload, key in zip(found, staged, strict=True):
            yield payload if key is None else await self._assembled(key)

    async def latest(self) -> bytes | None:
        """The group queued last, whether or not it has been served since."""
        (latest,) = keys(self._link, "latest")
        group_id = await self._link.call("HGET", latest, "id")
        if group_id is None:
            return None
        return await anext(self.load([int(group_id)]))

    async def _assembled(self, key: bytes) -> bytes | None:
        pieces: list[bytes] = []
        while True:
            at = len(pieces) * _PIECE_BYTES
            piece = await self._link.call("GETRANGE", key, at, at + _PIECE_BYTES - 1)
            if piece:
                pieces.append(piece)
            if len(piece) < _PIECE_BYTES:
                return b"".join(pieces) or None
