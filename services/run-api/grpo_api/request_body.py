"""Reads and decompresses request bodies, with a deadline and limits in bytes."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fastapi import Request
from isal import igzip, isal_zlib
from isal.isal_zlib import IsalError

from grpo_api.error_responses import too_large
from grpo_api.errors import BodiesFull, BodyTooSlow, Refused

INLINE_BYTES = 1024 * 1024
"""Content up to this size is decoded on the event loop: usually 1 to 2 ms, at worst 20 ms."""
_LARGE_SHARE = 7 / 8
"""Share of the memory limit that large bodies may use; the rest is kept for small ones."""
_GZIP_WINDOW_BITS = 31


@dataclass(frozen=True)
class RawBody:
    """A request's body as it arrived. `is_gzip`: its Content-Encoding is gzip."""

    content: bytes
    is_gzip: bool


class BodyReader:
    """Limits how long a body may take to arrive, and how much memory all bodies use.

    Args:
        deadline_s: from the start of reading a body until its last byte.
        max_held_bytes: limit on all bodies in memory, including those that are still arriving.
    """

    def __init__(self, deadline_s: float, max_held_bytes: int) -> None:
        self.deadline_s = deadline_s
        self.max_bytes = max_held_bytes
        self.held_bytes = 0

    @contextmanager
    def incoming(self, request: Request) -> Iterator[IncomingBody]:
        """The body of one request, counted as held until the block ends."""
        body = IncomingBody(self, request)
        try:
            yield body
        finally:
            body.keep(0)


class IncomingBody:
    def __init__(self, reader: BodyReader, request: Request) -> None:
        self._reader = reader
        self._request = request
        self._bytes = 0

    def keep(self, size: int) -> None:
        """Record that only `size` bytes made from the body are held from now on."""
        self._reader.held_bytes += size - self._bytes
        self._bytes = size

    async def read(self, max_bytes: int) -> RawBody:
        """The whole body as it was sent.

        Raises:
            Refused: 413, the body is longer than `max_bytes`; raised before the rest is read.
            BodiesFull: there is no room for the body; raised before the rest is read.
            BodyTooSlow: the deadline passed before the last byte.
        """
        headers = self._request.headers
        declared = headers.get("content-length", "0")
        if declared.isdecimal():
            self._check(int(declared[:20]), max_bytes)  # before the first byte is read
        chunks: list[bytes] = []
        try:
            async with asyncio.timeout(self._reader.deadline_s):
                async for chunk in self._request.stream():
                    if chunk:
                        self._check(self._bytes + len(chunk), max_bytes)
                        self.keep(self._bytes + len(chunk))
                        chunks.append(chunk)
        except TimeoutError as error:
            raise BodyTooSlow(self._bytes, self._reader.deadline_s) from error
        is_gzip = "gzip" in headers.get("content-encoding", "").lower()
        return RawBody(b"".join(chunks), is_gzip)

    def _check(self, body_bytes: int, max_bytes: int) -> None:
        """
        Args:
            body_bytes: length of the whole body, as far as it is known.
        """
        if body_bytes > max_bytes:
            raise too_large(max_bytes)
        room = self._reader.max_bytes * (_LARGE_SHARE if body_bytes > INLINE_BYTES else 1)
        if self._reader.held_bytes - self._bytes + body_bytes > room:
            raise BodiesFull(self._reader.held_bytes)


class TooMuchWork(Exception):
    """The content is too large to decode on the event loop."""


def inflate_member(body: bytes, max_bytes: int) -> bytes:
    """Decompress a body of exactly one gzip member, which is the usual case.

    Raises:
        TooMuchWork: the content is longer than `max_bytes`, or bytes follow the member.
        Refused: 400, the body is not valid gzip.
    """
    inflater = isal_zlib.decompressobj(_GZIP_WINDOW_BITS)
    try:
        # one byte more than allowed distinguishes "exactly full" from "too long"
        content: bytes = inflater.decompress(body, max_bytes + 1)
    except IsalError as error:  # type: ignore[misc]  # its type stub declares an instance
        raise _not_gzip(error) from error
    if len(content) > max_bytes or inflater.unused_data or not body:
        raise TooMuchWork
    if not inflater.eof:
        raise _not_gzip("the body ends before the end of the compressed data")
    return content


def inflate(body: bytes, max_bytes: int) -> bytes:
    """Decompress any number of gzip members (RFC 1952), with zeros between and after them.

    Raises:
        Refused: 413, the content is longer than `max_bytes` (no more is ever decompressed); or
            400, the body is not valid gzip.
    """
    try:
        with igzip.open(io.BytesIO(body)) as file:  # type: ignore[no-untyped-call]
            content: bytes = file.read(max_bytes + 1)
    except (IsalError, OSError, EOFError) as error:  # type: ignore[misc]  # as above
        raise _not_gzip(error) from error
    if len(content) > max_bytes:
        raise too_large(max_bytes)
    return content


def _not_gzip(reason: object) -> Refused:
    return Refused(400, f"the body is not valid gzip: {reason}")
