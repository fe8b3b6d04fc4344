"""Errors, and the answers to them: a 4xx status or 503, or 500 for an unexpected error.

GrpoError
├── GroupRefused          one group of a submission cannot be accepted
├── TrainerNotRegistered  a request for a batch before any trainer registered
├── UnsuitableRedis       no answer: run-api ends
└── Answered              has a status, a body and headers
    ├── Refused               4xx: the request conflicts with the run's state, or can never succeed
    ├── BodyTooSlow           408: a request body did not arrive within the deadline
    ├── Conflict              409: a request for a batch conflicts with the run's state
    │   ├── BatchUnknown          no batch of the run has this id; an acknowledgement gets 404
    │   └── BatchGone             the batch was deleted or handed out again while it was sent
    └── Unavailable           503: the same request may succeed later
        ├── QueueFull             the queue stayed full for as long as a submission may wait
        ├── StoreUnavailable      Redis did not answer in time, or does not accept writes
        └── ShuttingDown          the server has received a stop signal
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from grpo_core.errors import GrpoError, message_of
from grpo_core.wire.run_api import QUEUE_FULL

REQUEST_ID_HEADER = "x-request-id"
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that disconnected before the answer."""
FAILURE = "grpo.failure"
"""Key of a request's scope: why it was not carried out, for the log."""
_MAX_PROBLEMS = 20
_MAX_MESSAGE_CHARS = 2000
_MAX_LOCATION_CHARS = 100

T = TypeVar("T")
Detail = str | list[dict[str, Any]]
"""A message, or problems as FastAPI lists them: loc, msg and type."""


class Answered(GrpoError):
    """An error whose answer carries `detail` and `headers`."""

    status: int
    headers: ClassVar[Mapping[str, str]] = {}

    def __init__(self, detail: Detail) -> None:
        super().__init__(str(detail))
        self.detail = detail


class Refused(Answered):
    """The request changed nothing."""

    def __init__(self, status: int, detail: Detail) -> None:
        super().__init__(detail)
        self.status = status

    @property
    def reason(self) -> str:
        """`scores.1: Input should be a finite number (and 2 more)`"""
        if isinstance(self.detail, str):
            return self.detail
        first, *others = self.detail
        place = ".".join(map(str, first["loc"][1:]))  # without "body" or "header"
        more = f" (and {len(others)} more)" if others else ""
        return f"{place}: {first['msg']}{more}" if place else f"{first['msg']}{more}"

    def __reduce__(self) -> tuple[type[Refused], tuple[int, Detail]]:
        """Pickled when the decoder process sends this error back to the server."""
        return Refused, (self.status, self.detail)


class GroupRefused(GrpoError):
    """Group `index` cannot be accepted, so the whole submission is rejected. `is_final`: False if
    the same group may be accepted later."""

    def __init__(self, index: int, reason: str, *, is_final: bool = True) -> None:
        super().__init__(reason)
        self.index = index
        self.is_final = is_final

    def at(self, *location: str | int) -> Refused:
        """The HTTP answer; `location` is the group's place in the request body."""
        if self.is_final:
            return unprocessable([*location], str(self))
        return Refused(409, [_problem([*location], str(self), "buffer_full")])


class TrainerNotRegistered(GrpoError):
    """No trainer has registered for the run."""

    def __init__(self) -> None:
        super().__init__("Trainer not registered. Call /register first.")


class Conflict(Answered):
    """
    Args:
        parameter: the query parameter that conflicts.
        kind: the problem's `type` in the answer.
    """

    status = 409

    def __init__(self, parameter: str, kind: str, message: str) -> None:
        super().__init__(message)
        self.detail = [{"loc": ["query", parameter], "msg": message, "type": kind}]


class BatchUnknown(Conflict):
    def __init__(self, batch_id: int, last: int) -> None:
        super().__init__(
            "after",
            "batch_unknown",
            f"this run never handed out batch {batch_id}; the newest batch handed out is {last}. "
            "Redis may have lost newer batches, or the id may belong to another run",
        )


class BatchGone(Conflict):
    def __init__(self, batch_id: int) -> None:
        super().__init__(
            "after",
            "batch_gone",
            f"batch {batch_id} was acknowledged, handed out again or reset; request the next batch",
        )


class BodyTooSlow(Answered):
    """The connection is closed, since it would otherwise wait for the rest of the body."""

    status = 408
    headers: ClassVar[Mapping[str, str]] = {"Connection": "close"}

    def __init__(self, received_bytes: int, deadline_s: float) -> None:
        super().__init__(
            f"only {received_bytes} bytes of the body arrived within {deadline_s:g} s; send the "
            "request again, gzip-encoded or with fewer groups if the connection is slow"
        )


class Unavailable(Answered):
    """The same request may succeed later."""

    status = 503
    headers: ClassVar[Mapping[str, str]] = {"Retry-After": "1"}


class QueueFull(Unavailable):
    def __init__(self, waited_s: float) -> None:
        super().__init__(
            f"{QUEUE_FULL} for {waited_s:.0f} s because the trainer is too slow or has stopped; "
            "nothing was queued, send the same groups again later"
        )


class StoreUnavailable(Unavailable):
    """Redis did not answer within the deadline, or does not accept writes."""


class UnsuitableRedis(GrpoError):
    """A setting of Redis would lose parts of the run. Ends run-api."""


class ShuttingDown(Unavailable):
    def __init__(self) -> None:
        super().__init__("run-api is shutting down; send the same request again in a moment")


def unprocessable(location: list[str | int], message: str) -> Refused:
    """A 422 shaped like a validation error, for rules that depend on the run's state."""
    return Refused(422, [_problem(location, message, "unservable")])


def _problem(location: list[str | int], message: str, kind: str) -> dict[str, Any]:
    return {"loc": ["body", *location], "msg": message, "type": kind}


def too_large(max_bytes: int) -> Refused:
    return Refused(413, f"the body is larger than {max_bytes} bytes; send fewer groups per request")


def invalid(problems: Sequence[Any]) -> Refused:
    """422 with the first problems, each cut to a limited length.

    Without the invalid input, because JSON cannot hold a NaN in it.
    """
    return Refused(
        422,
        [
            {
                "loc": [
                    part if isinstance(part, int) else str(part)[:_MAX_LOCATION_CHARS]
                    for part in problem["loc"]
                ],
                "msg": message_of(problem)[:_MAX_MESSAGE_CHARS],
                "type": problem["type"],
            }
            for problem in problems[:_MAX_PROBLEMS]
        ],
    )


def validated(validate: Callable[[bytes], T], content: bytes) -> T:
    """Raises `Refused` (422) if pydantic finds the content of a body invalid."""
    try:
        return validate(content)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        problems = [{**problem, "loc": ("body", *problem["loc"])} for problem in found]
        raise invalid(problems) from error


def answer_to(error: Answered) -> JSONResponse:
    return JSONResponse({"detail": error.detail}, error.status, error.headers)


def answer_errors(app: FastAPI) -> None:
    """Register an answer for every error that a handler raises."""

    @app.exception_handler(Answered)
    async def answered(request: Request, error: Answered) -> JSONResponse:
        request.scope[FAILURE] = str(error)
        return answer_to(error)

    @app.exception_handler(RequestValidationError)
    async def rejected(_request: Request, error: RequestValidationError) -> JSONResponse:
        return answer_to(invalid(error.errors()))

    @app.exception_handler(ClientDisconnect)
    async def client_gone(_request: Request, _error: Exception) -> Response:
        """Only for the log and the metrics: the client has disconnected."""
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.exception_handler(Exception)
    async def unexpected(_request: Request, _error: Exception) -> JSONResponse:
        """uvicorn logs the traceback."""
        request_id: str = structlog.contextvars.get_contextvars()["request_id"]
        return JSONResponse(
            {"detail": "internal error; see run-api's log", "request_id": request_id},
            status_code=500,
            headers={REQUEST_ID_HEADER: request_id},
        )
