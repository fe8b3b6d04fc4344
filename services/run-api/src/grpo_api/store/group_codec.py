"""Groups as bytes: taken over as they were sent where that serves, never parsed again.

A stored group is the length of a tail (2 bytes), the tail, and a gzip member. What that holds,
without its last brace, followed by the tail, is the group's JSON with all 14 keys. So the body of a
submission that was gzip-encoded is stored as it came, and the tail adds the keys that it left out.
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
    """Written anew: with all keys, and nothing else."""
    text = group.model_dump_json().encode()
    return PackedGroup(group.env_id, group.size, stored(compress(text), absent=()))


def stored(member: bytes, absent: Sequence[str]) -> bytes:
    """
    Args:
        member: gzip of a group's JSON, which ends in its closing brace.
        absent: keys that it lacks; they are served as null.
    """
    tail = b"".join(b',"%s":null' % name.encode() for name in absent) + _CLOSING
    return len(tail).to_bytes(_LENGTH_BYTES, "big") + tail + member


def unpack(payload: bytes) -> bytes:
    """The group's JSON, the same bytes each time."""
    end = _LENGTH_BYTES + int.from_bytes(payload[:_LENGTH_BYTES], "big")
    text: bytes = isal_zlib.decompress(memoryview(payload)[end:], _GZIP_WINDOW_BITS)
    return text[: -len(_CLOSING)] + payload[_LENGTH_BYTES:end]


def unpacked_bytes(payload: bytes) -> int:
    """How much there is to unpack, as the member itself says (ISIZE of RFC 1952)."""
    return int.from_bytes(payload[-_ISIZE_BYTES:], "little")


def compress(text: bytes) -> bytes:
    """As one gzip member."""
    member: bytes = isal_zlib.compress(text, _LEVEL, _GZIP_WINDOW_BITS)
    return member
