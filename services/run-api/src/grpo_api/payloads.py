"""Groups as bytes: serialised once at the door, compressed at rest, joined into answers."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_core.wire import ScoredGroup

# Token ids and digits: level 1 halves what level 6 costs for a few percent more bytes.
_LEVEL = 1

NO_EXAMPLE: dict[str, list[Any]] = {
    name: []
    for name in (
        "tokens",
        "masks",
        "scores",
        "advantages",
        "ref_logprobs",
        "generation_params",
        "inference_logprobs",
        "messages",
        "images",
    )
}
"""Answer of `/latest_example` before any group was queued."""


@dataclass(frozen=True)
class PackedGroup:
    """A validated group, ready to be stored: `payload` is compressed JSON with all 14 keys."""

    env_id: int | None
    sequences: int
    payload: bytes


def pack(groups: Sequence[ScoredGroup]) -> list[PackedGroup]:
    return [
        PackedGroup(
            env_id=group.env_id,
            sequences=group.size,
            payload=zlib.compress(group.model_dump_json().encode(), _LEVEL),
        )
        for group in groups
    ]


def unpack(payload: bytes) -> bytes:
    """The group's JSON, byte for byte as it was packed."""
    return zlib.decompress(payload)


def batch_json(payloads: Sequence[bytes]) -> bytes:
    """The answer that hands out a batch."""
    return b'{"batch":[' + b",".join(unpack(payload) for payload in payloads) + b"]}"
