"""Reads and writes the payloads of groups in Redis.

Large payloads are read and written in pieces, because Redis answers no other request during one
long command.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from isal import isal_zlib

from grpo_api.errors import StoreUnavailable
from grpo_api.store.keys import RECEIPT_S
from grpo_api.store.redis import RedisLink
from grpo_core.wire.scored_group import ScoredGroup

GZIP_WINDOW_BITS = 31
"""Tells zlib to read and write gzip: 16, plus the largest window."""
GZIP_LEVEL = 1
"""Compresses digits almost as well as higher levels, in a tenth of the time."""
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
        keys = [self.staged_prefix + name for name in names]
        try:
            for key, payload in zip(keys, payloads, strict=True):
                await self._stage(key, payload)
            yield names
        finally:
            with suppress(StoreUnavailable):  # they also expire
                await self._link.script("release_staged", own_keys=keys)

    async def _stage(self, key: str, payload: bytes) -> None:
        for at in range(0, len(payload), _PIECE_BYTES):
            piece = payload[at : at + _PIECE_BYTES]
            (outcome,) = await self._link.script(
                "stage_piece", at, piece, RECEIPT_S, own_keys=[key]
            )
            if outcome != b"staged":
                raise StoreUnavailable("Redis lost part of a large group; send the groups again")

    async def load(self, group_ids: Sequence[int]) -> AsyncIterator[bytes | None]:
        """The payloads of these groups, in this order; None for a deleted one."""
        payloads, large = self._link.keys("payloads", "large")
        found, staged = await self._link.transaction(
            ("HMGET", payloads, *group_ids), ("HMGET", large, *group_ids)
        )
        for payload, key in zip(found, staged, strict=True):
            yield payload if key is None else await self._assembled(key)

    async def latest(self) -> bytes | None:
        """The payload of the group queued last, even if it has been handed out since."""
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
        # The payload may be deleted between two pieces.
        return payload if length and len(payload) == length else None


_LENGTH_BYTES = 2
_ISIZE_BYTES = 4
_CLOSING = b"}"


@dataclass(frozen=True)
class PackedGroup:
    """A valid group, ready to be stored."""

    env_id: int | None
    sequences: int
    payload: bytes


def pack(group: ScoredGroup) -> PackedGroup:
    """Write the group as JSON with exactly its 14 keys, and compress it."""
    text = group.model_dump_json().encode()
    return PackedGroup(group.env_id, group.size, payload_of(compress(text), absent=()))


def payload_of(member: bytes, absent: Sequence[str]) -> bytes:
    """
    Args:
        member: gzip of a group's JSON, which must end in its closing brace.
        absent: keys missing in that JSON; `unpack` adds them as null.
    """
    tail = b"".join(b',"%s":null' % name.encode() for name in absent) + _CLOSING
    return len(tail).to_bytes(_LENGTH_BYTES, "big") + tail + member


def unpack(payload: bytes) -> bytes:
    """The group's JSON, always the same bytes."""
    end = _LENGTH_BYTES + int.from_bytes(payload[:_LENGTH_BYTES], "big")
    text: bytes = isal_zlib.decompress(memoryview(payload)[end:], GZIP_WINDOW_BITS)
    return text[: -len(_CLOSING)] + payload[_LENGTH_BYTES:end]


def unpacked_bytes(payload: bytes) -> int:
    """Size of the JSON, from the gzip member's own field (ISIZE of RFC 1952)."""
    return int.from_bytes(payload[-_ISIZE_BYTES:], "little")


def compress(text: bytes) -> bytes:
    """Compress into one gzip member."""
    member: bytes = isal_zlib.compress(text, GZIP_LEVEL, GZIP_WINDOW_BITS)
    return member
