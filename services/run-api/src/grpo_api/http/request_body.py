"""Request bodies while they arrive: each has a deadline, and all together a limit in bytes."""

from __future__ import annotations

import asyncio
from types import TracebackType

from fastapi import Request

from grpo_api.errors import BodiesFull, BodyTooSlow
from grpo_api.http.problems import too_large
from grpo_api.ingest.decode import INLINE_BYTES, RawBody

_LARGE_FROM_BYTES = INLINE_BYTES
_LARGE_SHARE = 7 / 8
"""Of the limit. The rest is left to bodies of a usual size, whatever large ones do."""


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
        is_large = body_bytes > _LARGE_FROM_BYTES
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
