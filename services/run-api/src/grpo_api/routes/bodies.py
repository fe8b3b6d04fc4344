"""Bodies of registrations and ids, parsed."""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeVar

from fastapi import Depends, Request
from pydantic import TypeAdapter, ValidationError

from grpo_api.dependencies import services_of
from grpo_api.http.inflate import inflate
from grpo_api.http.problems import invalid
from grpo_core.wire import EnvironmentId, EnvironmentRegistration, Registration

MAX_RECORD_BYTES = 1024 * 1024
"""Registrations and ids, decompressed. Groups have a limit of their own."""

T = TypeVar("T")


class JsonBody(Generic[T]):
    """Dependency that parses the body as `model`, whatever the method and the content type."""

    def __init__(self, model: Any) -> None:
        self._adapter: TypeAdapter[T] = TypeAdapter(model)

    async def __call__(self, request: Request) -> T:
        with services_of(request).bodies.incoming(request) as incoming:
            body = await incoming.read(MAX_RECORD_BYTES)
        content = inflate(body.content, MAX_RECORD_BYTES) if body.is_gzip else body.content
        try:
            return self._adapter.validate_json(content)
        except ValidationError as error:
            raise invalid(error) from error


RegistrationBody = Annotated[Registration, Depends(JsonBody[Registration](Registration))]
EnvironmentRegistrationBody = Annotated[
    EnvironmentRegistration, Depends(JsonBody[EnvironmentRegistration](EnvironmentRegistration))
]
EnvironmentIdBody = Annotated[EnvironmentId, Depends(JsonBody[EnvironmentId](EnvironmentId))]
