"""Request bodies: read under a deadline and a limit in bytes, and decompressed under one."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fastapi import Request
from isal import igzip, isal_zlib
from isal.isal_zlib import IsalError

from grpo_api.errors import BodiesFull, BodyTooSlow, Refused
from grpo_api.http.error_responses import too_large

INLINE_BYTES = 1024 * 1024
"""Content that is decoded at once: a millisecond or two as it usually comes, 20 at worst."""
_LARGE_SHARE = 7 / 8
"""Of the limit. The rest is left to bodies of a usual size, whatever large ones do."""
_GZIP_WINDOW_BITS = 31


@dataclass(frozen=True)
class RawBody:
    """A request's body as it arrived. `is_gzip`: its Content-Encoding says so."""

    content: bytes
    is_gzip: bool


class BodyReader:
    """Args:
    deadline_s: from the first look at a body until it has arrived in full.
    max_held_bytes: of all bodies that this process holds, those under way included.
    """

    def __init__(self, deadline_s: float, max_held_bytes: int) -> None:
        self.deadline_s = deadline_s
        self._max_bytes = max_held_bytes
        self._max_bytes_for_large = int(max_held_bytes * _LARGE_SHARE)
        self._held_bytes = 0

    @contextmanager
    def incoming(self, request: Request) -> Iterator[IncomingBody]:
        """The body of one request, which counts as held until this ends."""
        body = IncomingBody(self, request)
        try:
            yield body
        finally:
            body.keep(0)

    def require_room(self, more_bytes: int, body_bytes: int) -> None:
        """For `more_bytes` of a body that is `body_bytes` long, as far as is known.

        Raises:
            BodiesFull
        """
        is_large = body_bytes > INLINE_BYTES
        limit = self._max_bytes_for_large if is_large else self._max_bytes
        if self._held_bytes + more_bytes > limit:
            raise BodiesFull(self._held_bytes)

    def count(self, more_bytes: int) -> None:
        """Negative: so much is no longer held."""
        self._held_bytes += more_bytes


class IncomingBody:
    def __init__(self, reader: BodyReader, request: Request) -> None:
        self._reader = reader
        self._request = request
        self._bytes = 0

    def keep(self, size: int) -> None:
        """Of the body no more than `size` bytes are held from here on: what was made of it."""
        self._reader.count(size - self._bytes)
        self._bytes = size

    async def read(self, max_bytes: int) -> RawBody:
        """The whole body as it was sent.

        Raises:
            Refused: 413 as soon as it is known to be longer than `max_bytes`.
            BodiesFull: as soon as there is known to be no room for it.
            BodyTooSlow: it did not arrive in full in time.
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
        if body_bytes > max_bytes:
            raise too_large(max_bytes)
        self._reader.require_room(body_bytes - self._bytes, body_bytes)


class TooMuchWork(Exception):
    """More than the caller wants to do now."""


def inflate_member(body: bytes, max_bytes: int) -> bytes:
    """Decompress gzip of exactly one member, the usual case, in one go.

    Raises:
        TooMuchWork: the content is longer than `max_bytes`, or something follows the member.
        Refused: 400, for anything that is not gzip.
    """
    inflater = isal_zlib.decompressobj(_GZIP_WINDOW_BITS)
    try:
        # one byte more than allowed tells "exactly full" from "too long"
        content: bytes = inflater.decompress(body, max_bytes + 1)
    except IsalError as error:  # type: ignore[misc]  # its stub says: an instance
        raise _not_gzip(error) from error
    if len(content) > max_bytes or inflater.unused_data or not body:
        raise TooMuchWork
    if not inflater.eof:
        raise _not_gzip("it ends in the middle of a member")
    return content


def inflate(body: bytes, max_bytes: int) -> bytes:
    """Decompress gzip of any number of members (RFC 1952), with zeros between and after them.

    Raises:
        Refused: 413 where the content is longer than `max_bytes`, of which no more is ever held;
            400 for anything that is not gzip.
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
    return Refused(400, f"body is not valid gzip: {reason}")
