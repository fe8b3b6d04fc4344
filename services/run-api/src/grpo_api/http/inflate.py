"""gzip in, bounded while it is decompressed."""

from __future__ import annotations

from isal import isal_zlib
from isal.isal_zlib import IsalError

from grpo_api.errors import Refused
from grpo_api.http.problems import too_large

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
