"""Encodes stored groups: the submitted gzip bytes, plus a tail with the missing keys.

A stored group consists of the length of the tail (2 bytes), the tail, and a gzip member. To read
it, decompress the member, remove its last brace and append the tail: that is JSON with all 14 keys.
So a gzip-encoded submission is stored as it arrived, without compressing it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isal import isal_zlib

from grpo_core.wire.scored_group import ScoredGroup

_LEVEL = 1
_GZIP_WINDOW_BITS = 31
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
    return PackedGroup(group.env_id, group.size, stored(compress(text), absent=()))


def stored(member: bytes, absent: Sequence[str]) -> bytes:
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
    text: bytes = isal_zlib.decompress(memoryview(payload)[end:], _GZIP_WINDOW_BITS)
    return text[: -len(_CLOSING)] + payload[_LENGTH_BYTES:end]


def unpacked_bytes(payload: bytes) -> int:
    """Size of the JSON, from the gzip member's own field (ISIZE of RFC 1952)."""
    return int.from_bytes(payload[-_ISIZE_BYTES:], "little")


def compress(text: bytes) -> bytes:
    """Compress into one gzip member."""
    member: bytes = isal_zlib.compress(text, _LEVEL, _GZIP_WINDOW_BITS)
    return member
