"""Reads and writes the payloads of groups in Redis.

Large payloads are read and written in pieces, because Redis answers no other request during one
long command.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from grpo_api.errors import StoreUnavailable
from grpo_api.store.keys import RECEIPT_S
from grpo_api.store.redis import RedisLink

_PIECE_BYTES = 512 * 1024


class PayloadStore:
    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self.staged_prefix = f"{link.prefix}staged:"

    @asynccontextmanager
    async def staged(self, payloads: Sequence[bytes]) -> AsyncIterator[list[str]]:
        """Stage payloads under these names, for the script that queues them by name.

        Payloads that are not queued when the block ends are deleted.

        Raises:
            StoreUnavailable
        """
        names = [os.urandom(16).hex() for _ in payloads]
        try:
            for name, payload in zip(names, payloads, strict=True):
                await self._stage(f"staged:{name}", payload)
            yield names
        finally:
            with suppress(StoreUnavailable):  # they also expire
                await self._link.script("release_staged", [f"staged:{name}" for name in names])

    async def _stage(self, name: str, payload: bytes) -> None:
        for at in range(0, len(payload), _PIECE_BYTES):
            piece = payload[at : at + _PIECE_BYTES]
            (outcome,) = await self._link.script("stage_piece", (name,), at, piece, RECEIPT_S)
            if outcome != b"staged":
                raise StoreUnavailable("Redis lost part of a large group; send the groups again")

    async def load(self, group_ids: Sequence[int]) -> AsyncIterator[bytes | None]:
        """Stored groups, in this order; None for a deleted one."""
        payloads, large = self._link.keys("payloads", "large")
        found, staged = await self._link.transaction(
            ("HMGET", payloads, *group_ids), ("HMGET", large, *group_ids)
        )
        for payload, key in zip(found, staged, strict=True):
            yield payload if key is None else await self._assembled(key)

    async def latest(self) -> bytes | None:
        """The group queued last, even if it has been handed out since."""
        (latest,) = self._link.keys("latest")
        group_id = await self._link.call("HGET", latest, "id")
        if group_id is None:
            return None
        return await anext(self.load([int(group_id)]))

    async def _assembled(self, key: bytes) -> bytes | None:
        length = await self._link.call("STRLEN", key)
        pieces = [
            await self._link.call("GETRANGE", key, at, at + _PIECE_BYTES - 1)
            for at in range(0, length, _PIECE_BYTES)
        ]
        payload = b"".join(pieces)
        # the payload may be deleted between two pieces
        return payload if length and len(payload) == length else None
