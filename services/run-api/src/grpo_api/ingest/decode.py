"""From the body of a submission to groups that are ready to be stored. Pure.

Bodies of a usual size are decoded where they arrive. What would keep other requests waiting is
decoded by `decode_worker`, with the same functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from isal import isal_zlib
from pydantic import Field, TypeAdapter, ValidationError

from grpo_api.http.inflate import TooMuchWork, inflate, inflate_member
from grpo_api.http.problems import invalid
from grpo_api.ingest.codec import PackedGroup, compress, pack, stored
from grpo_api.ingest.group_scan import scan_group
from grpo_core.wire import ScoredGroup

INLINE_BYTES = 1024 * 1024
"""Content that is decoded at once: a millisecond or two as it usually comes, 20 at worst."""

MAX_GROUPS = 1024
"""In one list. They are queued in one step, during which Redis serves nobody else."""

_LIST: TypeAdapter[list[ScoredGroup]] = TypeAdapter(
    Annotated[list[ScoredGroup], Field(fail_fast=True, max_length=MAX_GROUPS)]
)


@dataclass(frozen=True)
class RawBody:
    """A request's body as it arrived. `is_gzip`: its Content-Encoding says so."""

    content: bytes
    is_gzip: bool


@dataclass(frozen=True)
class Decoded:
    """Attributes:
    fingerprint: of the JSON as it was sent; the same for a body that is sent again.
    """

    groups: list[PackedGroup]
    fingerprint: str


Decode = Callable[[RawBody, int | None], Decoded]
"""
Args:
    max_bytes: largest content to decode, or None for `INLINE_BYTES` and what is simple.
Raises:
    TooMuchWork: without `max_bytes`: it has to be decoded elsewhere.
    Refused: 400 for broken gzip, 413 above `max_bytes`, 422 for what breaks the record.
"""


def decode_group(body: RawBody, max_bytes: int | None) -> Decoded:
    """The one group of a `POST /scored_data`, as `Decode`."""
    text = _content(body, max_bytes)
    facts = scan_group(text)
    if facts is None:
        group = pack(_validated(text))
    else:
        # Read without a limit of its own, it may be in several members: what is stored has one.
        member = body.content if body.is_gzip and max_bytes is None else compress(text)
        group = PackedGroup(facts.env_id, facts.sequences, stored(member, facts.absent))
    return Decoded([group], _fingerprint(text))


def decode_groups(body: RawBody, max_bytes: int | None) -> Decoded:
    """The groups of a `POST /scored_data_list`, as `Decode`."""
    text = _content(body, max_bytes)
    try:
        groups = _LIST.validate_json(text)
    except ValidationError as error:
        raise invalid(error) from error
    return Decoded([pack(group) for group in groups], _fingerprint(text))


def _content(body: RawBody, max_bytes: int | None) -> bytes:
    if body.is_gzip and max_bytes is None:
        return inflate_member(body.content, INLINE_BYTES)
    if body.is_gzip and max_bytes is not None:
        return inflate(body.content, max_bytes)
    if max_bytes is None and len(body.content) > INLINE_BYTES:
        raise TooMuchWork
    return body.content


def _validated(text: bytes) -> ScoredGroup:
    """By pydantic's own parser, which refuses what Python's would let through or fail on: lone
    surrogates, nesting without end, integers of any length, bytes that are not UTF-8."""
    try:
        return ScoredGroup.model_validate_json(text)
    except ValidationError as error:
        raise invalid(error) from error


def _fingerprint(text: bytes) -> str:
    return f"{isal_zlib.crc32(text):08x}{len(text):x}"
