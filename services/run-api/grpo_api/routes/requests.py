"""What handlers use: the services, bodies within limits of time and memory, and headers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import Depends, Header, Request
from pydantic import BaseModel, StringConstraints, TypeAdapter, ValidationError, WithJsonSchema

from grpo_api.decode import INLINE_BYTES, RawBody, SubmissionDecoder, inflate
from grpo_api.errors import BodyTooSlow, Refused, Unavailable, too_large, validated
from grpo_api.intake import Intake
from grpo_api.metrics import Metrics
from grpo_api.planning.run_view import QueueLimits
from grpo_api.store.run import RunStore
from grpo_core.closing import ClosesOnExit
from grpo_core.errors import problems_of
from grpo_core.security import listed
from grpo_core.wire.run_api import (
    ITEM_POSITIONS_HEADER,
    RUN_UUID_HEADER,
    EnvironmentId,
    EnvironmentRegistration,
    Registration,
)

MAX_RECORD_BYTES = 1024 * 1024
"""Limit on a decompressed registration or id. Groups have a separate limit."""
_LARGE_SHARE = 7 / 8
"""Share of the memory limit that large bodies may use; the rest is kept for small ones."""


@dataclass
class BodyLimits:
    """Limits how long a body may take to arrive, and how much memory all bodies use."""

    deadline_s: float
    """From the start of reading a body until its last byte."""
    max_bytes: int
    """Limit on all bodies in memory, including those that are still arriving."""
    held_bytes: int = 0


class IncomingBody(ClosesOnExit):
    """The body of one request, counted as held until the block ends."""

    def __init__(self, limits: BodyLimits, request: Request) -> None:
        self._limits = limits
        self._request = request
        self._bytes = 0

    def close(self) -> None:
        self.keep(0)

    def keep(self, size: int) -> None:
        """Record that only `size` bytes made from the body are held from now on."""
        self._limits.held_bytes += size - self._bytes
        self._bytes = size

    async def read(self, max_bytes: int) -> RawBody:
        """The whole body as it was sent.

        Raises:
            Refused: 413, the body is longer than `max_bytes`; raised before the rest is read.
            Unavailable: there is no room for the body; raised before the rest is read.
            BodyTooSlow: the deadline passed before the last byte.
        """
        headers = self._request.headers
        declared = headers.get("content-length", "0")
        if declared.isdecimal():
            self._check(int(declared[:20]), max_bytes)  # before the first byte is read
        chunks: list[bytes] = []
        try:
            async with asyncio.timeout(self._limits.deadline_s):
                async for chunk in self._request.stream():
                    if chunk:
                        self._check(self._bytes + len(chunk), max_bytes)
                        self.keep(self._bytes + len(chunk))
                        chunks.append(chunk)
        except TimeoutError as error:
            raise BodyTooSlow(self._bytes, self._limits.deadline_s) from error
        is_gzip = "gzip" in listed(headers.get("content-encoding", "").lower())
        return RawBody(b"".join(chunks), is_gzip)

    def _check(self, body_bytes: int, max_bytes: int) -> None:
        """
        Args:
            body_bytes: length of the whole body, as far as it is known.
        """
        if body_bytes > max_bytes:
            raise too_large(max_bytes)
        room = self._limits.max_bytes * (_LARGE_SHARE if body_bytes > INLINE_BYTES else 1)
        if self._limits.held_bytes - self._bytes + body_bytes > room:
            raise Unavailable(
                f"request bodies hold {self._limits.held_bytes} bytes; send the request again later"
            )


@dataclass(frozen=True)
class AppServices:
    """The parts of the application that handlers use."""

    store: RunStore
    closing: asyncio.Event
    metrics: Metrics
    bodies: BodyLimits
    decoder: SubmissionDecoder
    intake: Intake
    limits: QueueLimits


async def services_of(request: Request) -> AppServices:
    """A coroutine, because FastAPI would run a plain function in a thread, which costs more."""
    services: AppServices = request.app.state.services
    return services


Services = Annotated[AppServices, Depends(services_of)]

T = TypeVar("T", bound=BaseModel)


def _read_as(record: type[T]) -> Callable[[Request, AppServices], Awaitable[T]]:
    """A dependency that parses the body as `record`, for any method and content type."""

    async def read(request: Request, services: Services) -> T:
        with IncomingBody(services.bodies, request) as incoming:
            body = await incoming.read(MAX_RECORD_BYTES)
        content = inflate(body.content, MAX_RECORD_BYTES) if body.is_gzip else body.content
        return validated(record.model_validate_json, content)

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
    # Declared only: `checked_key` checks it, since a refusal of groups is counted.
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

ItemPositions = Annotated[
    str,
    Header(
        alias=ITEM_POSITIONS_HEADER,
        description="items that the environment has used, with those of these groups: JSON, ranges "
        'of numbers by names of its choice, `{"gsm8k": "0-41,43-45"}`. run-api adds them up, and '
        "answers POST /register-env with them. Without it, nothing is noted",
    ),
]
_Ranges = Annotated[
    str, StringConstraints(pattern="^[0-9]{1,15}-[0-9]{1,15}(,[0-9]{1,15}-[0-9]{1,15})*$")
]
_POSITIONS = TypeAdapter(dict[str, _Ranges])


def checked_positions(given: str) -> str:
    """
    Raises:
        Refused: 422, the header is not a valid `ItemPositions`.
    """
    try:
        if given:
            _POSITIONS.validate_json(given)
    except ValidationError as error:
        raise _refused_header(ITEM_POSITIONS_HEADER, problems_of(error)) from error
    return given


def checked_key(key: str | None) -> str | None:
    """
    Raises:
        Refused: 422, the key is not a valid `IdempotencyKey`.
    """
    if key is None or (len(key) <= _MAX_KEY_CHARS and _is_key(key)):
        return key
    problem = f"Idempotency-Key must be 1 to {_MAX_KEY_CHARS} visible ASCII characters"
    raise _refused_header("idempotency-key", problem, "invalid_key")


def _refused_header(name: str, problem: str, kind: str = "invalid_header") -> Refused:
    return Refused(422, [{"loc": ["header", name], "msg": problem, "type": kind}])
