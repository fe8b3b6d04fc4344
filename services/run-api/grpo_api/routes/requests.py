"""FastAPI dependencies of the handlers: services, request bodies, the idempotency key."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import Depends, Header, Request
from pydantic import BaseModel, ValidationError, WithJsonSchema

from grpo_api.decode import SubmissionDecoder
from grpo_api.dispatcher import BatchDispatcher
from grpo_api.error_responses import invalid
from grpo_api.errors import Refused
from grpo_api.intake import Intake
from grpo_api.metrics import Metrics
from grpo_api.planning.run_view import Limits
from grpo_api.request_body import BodyReader, inflate
from grpo_api.store import RunStore
from grpo_api.waiting import Lifetime
from grpo_core.wire.run_api import (
    RUN_UUID_HEADER,
    EnvironmentId,
    EnvironmentRegistration,
    Registration,
)


@dataclass(frozen=True)
class AppServices:
    """The parts of the application that handlers use."""

    store: RunStore
    lifetime: Lifetime
    metrics: Metrics
    dispatcher: BatchDispatcher
    bodies: BodyReader
    decoder: SubmissionDecoder
    intake: Intake
    limits: Limits


def services_of(request: Request) -> AppServices:
    services: AppServices = request.app.state.services
    return services


async def _services(request: Request) -> AppServices:
    """A coroutine, because FastAPI would run a plain function in a thread, which costs more."""
    return services_of(request)


Services = Annotated[AppServices, Depends(_services)]


MAX_RECORD_BYTES = 1024 * 1024
"""Limit on a decompressed registration or id. Groups have a separate limit."""

T = TypeVar("T", bound=BaseModel)


def _read_as(record: type[T]) -> Callable[[Request, AppServices], Awaitable[T]]:
    """A dependency that parses the body as `record`, for any method and content type."""

    async def read(request: Request, services: Services) -> T:
        with services.bodies.incoming(request) as incoming:
            body = await incoming.read(MAX_RECORD_BYTES)
        content = inflate(body.content, MAX_RECORD_BYTES) if body.is_gzip else body.content
        try:
            return record.model_validate_json(content)
        except ValidationError as error:
            raise invalid(error) from error

    return read


RegistrationBody = Annotated[Registration, Depends(_read_as(Registration))]
EnvironmentRegistrationBody = Annotated[
    EnvironmentRegistration, Depends(_read_as(EnvironmentRegistration))
]
EnvironmentIdBody = Annotated[EnvironmentId, Depends(_read_as(EnvironmentId))]

_MAX_KEY_CHARS = 255
_KEY_PATTERN = "^[!-~]+$"
_is_key = re.compile(_KEY_PATTERN).fullmatch

_Key = Annotated[
    str,
    # declared only: `checked_key` checks it, since a refusal of groups is counted
    WithJsonSchema(
        {"type": "string", "minLength": 1, "maxLength": _MAX_KEY_CHARS, "pattern": _KEY_PATTERN}
    ),
]
IdempotencyKey = Annotated[
    _Key | None,
    Header(
        description="idempotency key: of several requests with the same key, run-api carries out "
        "only the first",
    ),
]

RunUuid = Annotated[
    str,
    Header(
        alias=RUN_UUID_HEADER,
        description="run_uuid of POST /register-env; run-api refuses groups of another run. "
        "Without it, run-api accepts all groups",
    ),
]


def checked_key(key: str | None) -> str | None:
    """
    Raises:
        Refused: 422, the key is not a valid `IdempotencyKey`.
    """
    if key is None or (len(key) <= _MAX_KEY_CHARS and _is_key(key)):
        return key
    problem = f"Idempotency-Key must be 1 to {_MAX_KEY_CHARS} visible ASCII characters"
    raise Refused(
        422, [{"loc": ["header", "idempotency-key"], "msg": problem, "type": "invalid_key"}]
    )
