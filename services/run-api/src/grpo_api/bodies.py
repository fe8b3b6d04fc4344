"""Request bodies: bounded, decompressed while they are bounded, then parsed as strict JSON."""

from __future__ import annotations

import zlib
from typing import Annotated, Any, Generic, TypeVar

from fastapi import Depends, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import Field, TypeAdapter, ValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from grpo_api.errors import Refused
from grpo_core.wire import EnvironmentId, EnvironmentRegistration, Registration, ScoredGroup

_GZIP_WINDOW_BITS = 31

T = TypeVar("T")


class BodyMiddleware:
    """Hands every request on with its whole body in one message, never over `max_body_bytes`.

    A body whose Content-Encoding contains "gzip" is decompressed. 413 where the body is over the
    limit before or after decompression, 400 where it is not valid gzip.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(Headers(scope=scope), receive)
        except ClientDisconnect:
            return
        except Refused as error:
            answer = JSONResponse({"detail": error.detail}, status_code=error.status)
            await answer(scope, receive, send)
            return
        headers = MutableHeaders(scope=scope)
        del headers["content-encoding"]
        headers["content-length"] = str(len(body))
        await self._app(scope, _replay(body, receive), send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        raw_left = self._max_body_bytes
        inflater = (
            Inflater(self._max_body_bytes)
            if "gzip" in headers.get("content-encoding", "").lower()
            else None
        )
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk: bytes = message.get("body", b"")
            more = message.get("more_body", False)
            raw_left -= len(chunk)
            if raw_left < 0:
                raise too_large(self._max_body_bytes)
            body += inflater.feed(chunk) if inflater else chunk
        if inflater:
            inflater.finish()
        return bytes(body)


class Inflater:
    """Decompresses gzip of any number of members (RFC 1952), piece by piece, up to a limit.

    Raises:
        Refused: 413 as soon as the output passes the limit, 400 for anything that is not gzip.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._left = max_bytes
        self._member = zlib.decompressobj(_GZIP_WINDOW_BITS)
        self._in_member = False
        self._members = 0

    def feed(self, data: bytes) -> bytes:
        output = bytearray()
        while data:
            if not self._in_member:
                data = self._open_member(data)
                continue
            try:
                # one byte more than allowed tells "exactly full" from "too large"
                piece = self._member.decompress(data, self._left + 1)
            except zlib.error as error:
                raise Refused(400, f"body is not valid gzip: {error}") from error
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
            raise Refused(400, "body is not valid gzip: it ends in the middle of a member")

    def _open_member(self, data: bytes) -> bytes:
        if self._members:
            # padding between and after members is zeros, as gzip(1) accepts it
            data = data.lstrip(b"\0")
        if data:
            self._member = zlib.decompressobj(_GZIP_WINDOW_BITS)
            self._in_member = True
            self._members += 1
        return data


def too_large(max_bytes: int) -> Refused:
    return Refused(413, f"body is larger than {max_bytes} bytes; send fewer groups at a time")


def _replay(body: bytes, receive: Receive) -> Receive:
    """A receive channel that gives `body` once, then whatever the server still has to say."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed


class JsonBody(Generic[T]):
    """Dependency that parses the body as `model`, whatever the method and the content type.

    pydantic's own parser refuses, with a 422, what Python's would let through or fail on: lone
    surrogates, nesting without end, integers of any length, bytes that are not UTF-8.
    """

    def __init__(self, model: Any) -> None:
        self._adapter: TypeAdapter[T] = TypeAdapter(model)

    async def __call__(self, request: Request) -> T:
        try:
            return self._adapter.validate_json(await request.body())
        except ValidationError as error:
            raise RequestValidationError(
                [
                    {**problem, "loc": ("body", *problem["loc"])}
                    for problem in error.errors(
                        include_url=False, include_context=False, include_input=False
                    )
                ]
            ) from error


Groups = Annotated[list[ScoredGroup], Field(fail_fast=True)]

RegistrationBody = Annotated[Registration, Depends(JsonBody[Registration](Registration))]
EnvironmentRegistrationBody = Annotated[
    EnvironmentRegistration, Depends(JsonBody[EnvironmentRegistration](EnvironmentRegistration))
]
EnvironmentIdBody = Annotated[EnvironmentId, Depends(JsonBody[EnvironmentId](EnvironmentId))]
GroupBody = Annotated[ScoredGroup, Depends(JsonBody[ScoredGroup](ScoredGroup))]
GroupsBody = Annotated[list[ScoredGroup], Depends(JsonBody[list[ScoredGroup]](Groups))]
