"""Request bodies: read under a deadline and a limit in bytes, and decompressed under one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import TracebackType

from fastapi import Request
from isal import isal_zlib
from isal.isal_zlib import IsalError

from grpo_api.errors import BodiesFull, BodyTooSlow, Refused
from grpo_api.http.error_responses import too_large

INLINE_BYTES = 1024 * 1024
"""Content that is decoded at once: a millisecond or two as it usually comes, 20 at worst."""
_LARGE_SHARE = 7 / 8
"""Of the limit. The rest is left to bodies of a usual size, whatever large ones do."""


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

    def incoming(self, request: Request) -> IncomingBody:
        return IncomingBody(self, request)

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
    """The body of one request, which counts as held until its `with` block is left."""

    __slots__ = ("_bytes", "_reader", "_request")

    def __init__(self, reader: BodyReader, request: Request) -> None:
        self._reader = reader
        self._request = request
        self._bytes = 0

    def __enter__(self) -> IncomingBody:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.keep(0)

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


_GZIP_WINDOW_BITS = 31
_MAX_MEMBERS = 1000
_SLICE_BYTES = 16 * 1024
"""What a member leaves unread is copied, once for each member in a slice."""


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
        raise _cut_short()
    return content


def inflate(body: bytes, max_bytes: int) -> bytes:
    """Decompress gzip of any number of members (RFC 1952), with zeros between and after them.

    Raises:
        Refused: 413 where the content is longer than `max_bytes`, of which no more is ever held;
            400 for anything that is not gzip, and for more than 1000 members.
    """
    inflater = Inflater(max_bytes)
    slices = (body[at : at + _SLICE_BYTES] for at in range(0, len(body), _SLICE_BYTES))
    content = b"".join(map(inflater.feed, slices))
    inflater.finish()
    return content


class Inflater:
    """The same, piece by piece."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._left = max_bytes
        self._member = isal_zlib.decompressobj(_GZIP_WINDOW_BITS)
        self._in_member = False
        self._members = 0

    def feed(self, data: bytes) -> bytes:
        output = bytearray()
        while data:
            if not self._in_member:
                data = self._open_member(data)
                continue
            try:
                piece = self._member.decompress(data, self._left + 1)
            except IsalError as error:  # type: ignore[misc]  # its stub says: an instance
                raise _not_gzip(error) from error
            self._left -= len(piece)
            if self._left < 0:
                raise too_large(self._max_bytes)
            output += piece
            data = self._member.unconsumed_tail or self._member.unused_data
            self._in_member = not self._member.eof
        return bytes(output)

    def finish(self) -> None:
        """Raises `Refused` (400) where the last member is cut short."""
        if self._in_member:
            raise _cut_short()

    def _open_member(self, data: bytes) -> bytes:
        if self._members:
            # padding between and after members is zeros, as gzip(1) accepts it
            data = data.lstrip(b"\0")
        if data:
            if self._members == _MAX_MEMBERS:
                raise Refused(400, f"body has more than {_MAX_MEMBERS} gzip members")
            self._member = isal_zlib.decompressobj(_GZIP_WINDOW_BITS)
            self._in_member = True
            self._members += 1
        return data


def _not_gzip(error: Exception) -> Refused:
    return Refused(400, f"body is not valid gzip: {error}")


def _cut_short() -> Refused:
    return Refused(400, "body is not valid gzip: it ends in the middle of a member")
