"""The receipt of a completion: what the server sampled, in a few bytes that travel with the group.

The server gives a receipt with each completion. The environment passes it on as it is, in the
entry `RECEIPT` of a sequence's `overrides`, and adds the score. The trainer compares both with what
arrives.

A digest stands for n values of 4 bytes. It holds n, a hash of all values, and up to 64 checkpoints,
which find the first value that differs: the place of each if n is at most 64, else a range.
"""

from __future__ import annotations

from array import array
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Annotated, Any, TypeAlias
from zlib import crc32

from pydantic import Base64Bytes, Field

from grpo_core.wire.fields import WireModel
from grpo_core.wire.policy_version import PolicyVersion

RECEIPT = "rollout_receipt"
"""In `overrides`: the `RolloutReceipt` of a sequence."""
NEUTRAL_SAMPLING: dict[str, tuple[object, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "structured_outputs": (),
}
"""Sampling parameters, with the values for which the behaviour logprobs are those of
softmax(logits / temperature)."""
_COUNT_BYTES, _HASH_BYTES, _CHECKPOINTS = 4, 8, 64
_VALUE_BYTES = 4
Values: TypeAlias = "array[int] | array[float]"


class CompletionReceipt(WireModel):
    """What the server sampled. `prompt`, `completion`: digests of token ids; `logprobs`: of the
    sampled tokens' logprobs in float32; `versions`: at the first and at the last token; `sampling`:
    see `distribution`."""

    prompt: Base64Bytes
    completion: Base64Bytes
    logprobs: Base64Bytes
    versions: tuple[PolicyVersion, PolicyVersion]
    sampling: dict[str, float | bool]


class RolloutReceipt(WireModel):
    """Of one sequence. `score`: the environment's; `completions`: in order, those of the server."""

    score: float | None = None
    completions: Annotated[list[CompletionReceipt], Field(min_length=1)]


def distribution(temperature: float, sampling: Mapping[str, Any]) -> dict[str, float | bool]:
    """The temperature, and the parameters that are not neutral; True for those that are no
    numbers."""
    given = {
        name: value if isinstance(value, int | float) else True
        for name, neutral in NEUTRAL_SAMPLING.items()
        if (value := sampling.get(name)) is not None and value not in neutral
    }
    return {"temperature": temperature, **given}


def receipts_of(
    prompt_ids: Sequence[int],
    completions: Iterable[tuple[Sequence[int], Iterable[float], Any]],
    sampling: Mapping[str, float | bool],
) -> list[dict[str, Any]]:
    """A `CompletionReceipt` in JSON for each completion of a prompt.

    Args:
        completions: token ids, logprobs and versions of each
        sampling: the `distribution`
    """
    prompt = _text(packed_ids(prompt_ids))
    return [
        {
            "prompt": prompt,
            "completion": _text(packed_ids(token_ids)),
            "logprobs": _text(packed_logprobs(logprobs)),
            "versions": versions,
            "sampling": sampling,
        }
        for token_ids, logprobs, versions in completions
    ]


def packed_ids(token_ids: Iterable[int]) -> Values:
    return array("I", token_ids)


def packed_logprobs(logprobs: Iterable[float]) -> Values:
    """In float32. JSON may hold the same numbers as float64."""
    return array("f", logprobs)


def digest(values: Values) -> bytes:
    count, data = len(values), values.tobytes()
    return count.to_bytes(_COUNT_BYTES, "little") + _hash(data) + _checkpoints(data, _ends(count))


def count_of(digest: bytes) -> int:
    """Number of values."""
    return int.from_bytes(digest[:_COUNT_BYTES], "little")


def first_changed(values: Values, digest: bytes) -> range | None:
    """The place of the first value that differs from those of the digest; None if all are equal.

    A range of several places if the digest does not tell them apart. Its end is certain, its start
    in 255 of 256 cases.
    """
    count, data = count_of(digest), values.tobytes()
    hashed_to = _COUNT_BYTES + _HASH_BYTES
    if len(values) == count and digest[_COUNT_BYTES:hashed_to] == _hash(data):
        return None
    start = 0
    ends = [end for end in _ends(count) if end <= len(values)]
    for end, sent, arrived in zip(ends, digest[hashed_to:], _checkpoints(data, ends), strict=False):
        if sent != arrived:
            return range(start, end)
        start = end
    if len(values) == count:
        return range(max(count, 1))
    return range(start, min(count, len(values)) + 1)


def _text(values: Values) -> str:
    return b64encode(digest(values)).decode()


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=_HASH_BYTES).digest()


def _ends(count: int) -> list[int]:
    """Numbers of values before the checkpoints."""
    checkpoints = min(count, _CHECKPOINTS)
    return [-(-count * k // checkpoints) for k in range(1, checkpoints + 1)]


def _checkpoints(data: bytes, ends: Iterable[int]) -> bytes:
    """For each end, a byte of the checksum of the values before it."""
    found, checksum, start = bytearray(), 0, 0
    for end in ends:
        checksum, start = crc32(data[start : (stop := _VALUE_BYTES * end)], checksum), stop
        found.append(checksum & 0xFF)
    return bytes(found)
