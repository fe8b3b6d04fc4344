"""Request bodies: bounded while they arrive, then decoded."""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeVar

from fastapi import Depends, Request
from pydantic import TypeAdapter, ValidationError

from grpo_api.decoding import RawBody
from grpo_api.inflate import inflate
from grpo_api.problems import invalid, too_large
from grpo_core.wire import EnvironmentId, EnvironmentRegistration, Registration

_MAX_RECORD_BYTES = 1024 * 1024
"""Registrations and ids, decompressed. Groups have a limit of their own."""

T = TypeVar("T")


async def read_body(request: Request, max_bytes: int) -> RawBody:
    """The whole body as it was sent.

    Raises:
        Refused: 413 as soon as it is known to be longer than `max_bytes`.
    """
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise too_large(max_bytes)
    chunks, length = [], 0
    async for chunk in request.stream():
        chunks.append(chunk)
        length += len(chunk)
        if length > max_bytes:
            raise too_large(max_bytes)
    is_gzip = "gzip" in request.headers.get("content-encoding", "").lower()
    return RawBody(b"".join(chunks), is_gzip)


class JsonBody(Generic[T]):
    """Dependency that parses the body as `model`, whatever the method and the content type."""

    def __init__(self, model: Any) -> None:
        self._adapter: TypeAdapter[T] = TypeAdapter(model)

    async def __call__(self, request: Request) -> T:
        body = await read_body(request, _MAX_RECORD_BYTES)
        content = inflate(body.content, _MAX_RECORD_BYTES) if body.is_gzip else body.content
        try:
            return self._adapter.validate_json(content)
        except ValidationError as error:
            raise invalid(error) from error


RegistrationBody = Annotated[Registration, Depends(JsonBody[Registration](Registration))]
EnvironmentRegistrationBody = Annotated[
    EnvironmentRegistration, Depends(JsonBody[EnvironmentRegistration](EnvironmentRegistration))
]
EnvironmentIdBody = Annotated[EnvironmentId, Depends(JsonBody[EnvironmentId](EnvironmentId))]
