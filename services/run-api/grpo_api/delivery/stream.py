"""Streams stored groups as JSON, unpacking them while the answer is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from isal import isal_zlib
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from grpo_api.errors import BatchGone
from grpo_api.store.group_codec import unpack, unpacked_bytes
from grpo_api.store.payloads import PayloadStore
from grpo_api.store.results import DueBatch

_GROUPS_AT_A_TIME = 8
_PIECE_BYTES = 256 * 1024
"""Bytes that are compressed before other requests get a turn: about a millisecond."""
_UNPACKED_INLINE = 1024 * 1024
"""Bytes of JSON that take a millisecond or two. Larger groups are unpacked in a thread;
decompression releases the interpreter lock."""
_LEVEL = 1
_GZIP_WINDOW_BITS = 31


async def batch_pieces(store: PayloadStore, due: DueBatch, head: bytes) -> AsyncIterator[bytes]:
    """Yield the JSON `{<head>"batch":[group, ...]}` in pieces, without parsing the groups.

    Raises:
        BatchGone: the batch was acknowledged, or the run was reset, while it was sent.
        StoreUnavailable
    """
    yield b"{" + head + b'"batch":['
    group_ids = due.lease.group_ids
    for start in range(0, len(group_ids), _GROUPS_AT_A_TIME):
        payloads = store.load(group_ids[start : start + _GROUPS_AT_A_TIME])
        is_first = start == 0
        async for payload in payloads:
            if payload is None:
                raise BatchGone(due.lease.batch_id)
            if not is_first:
                yield b","
            is_first = False
            async for piece in group_pieces(payload):
                yield piece
    yield b"]}"


async def group_pieces(payload: bytes) -> AsyncIterator[bytes]:
    """Yield the JSON of one stored group in pieces."""
    is_small = unpacked_bytes(payload) <= _UNPACKED_INLINE
    text = unpack(payload) if is_small else await run_in_threadpool(unpack, payload)
    for at in range(0, len(text), _PIECE_BYTES):
        yield text[at : at + _PIECE_BYTES]
        # a send returns without a pause while the socket accepts data, so give others a turn
        await asyncio.sleep(0)


def group_answer(payload: bytes, compressed: bool) -> Response:
    """One stored group as an answer. If it is small, the middleware compresses it."""
    if unpacked_bytes(payload) <= _PIECE_BYTES:
        return Response(unpack(payload), media_type="application/json")
    pieces = group_pieces(payload)
    if not compressed:
        return StreamingResponse(pieces, media_type="application/json")
    headers = {"content-encoding": "gzip", "vary": "Accept-Encoding"}
    return StreamingResponse(gzipped(pieces), media_type="application/json", headers=headers)


async def gzipped(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Compress the pieces as one gzip member."""
    compressor = isal_zlib.compressobj(_LEVEL, isal_zlib.DEFLATED, _GZIP_WINDOW_BITS)
    async for piece in pieces:
        if compressed := compressor.compress(piece):
            yield compressed
    yield compressor.flush()


async def begun(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Load the first group before the answer starts, so that a failure can set the status."""
    first = [await anext(pieces), await anext(pieces)]

    async def all_of_it() -> AsyncIterator[bytes]:
        for piece in first:
            yield piece
        async for piece in pieces:
            yield piece

    return all_of_it()
