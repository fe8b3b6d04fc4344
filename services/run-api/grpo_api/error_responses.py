"""Turns errors into HTTP answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from grpo_api.errors import Answered, Refused
from grpo_core.validation import message_of

REQUEST_ID_HEADER = "x-request-id"
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that disconnected before the answer."""
_MAX_PROBLEMS = 20
_MAX_MESSAGE_CHARS = 2000
_MAX_LOCATION_CHARS = 100


def answer_errors(app: FastAPI) -> None:
    """Register an answer for every error that a handler raises."""
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Answered, _answered)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(Exception, _unhandled)


def answer_to(error: Answered) -> JSONResponse:
    return JSONResponse({"detail": error.detail}, error.status, error.headers)


async def _answered(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Answered)
    return answer_to(error)


async def _invalid(_request: Request, error: Exception) -> JSONResponse:
    """422 without the invalid input, because JSON cannot hold a NaN in it."""
    assert isinstance(error, RequestValidationError)
    return answer_to(Refused(422, listed(error.errors())))


async def _client_gone(_request: Request, _error: Exception) -> Response:
    """Only for the log and the metrics: the client has disconnected."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _unhandled(_request: Request, _error: Exception) -> JSONResponse:
    """The answer after an unexpected error. uvicorn logs its traceback."""
    request_id: str = structlog.contextvars.get_contextvars()["request_id"]
    return JSONResponse(
        {"detail": "internal error; see run-api's log", "request_id": request_id},
        status_code=500,
        headers={REQUEST_ID_HEADER: request_id},
    )


def invalid(error: ValidationError) -> Refused:
    """422 for an invalid body, without the input, because JSON cannot hold a NaN in it."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return Refused(
        422, listed([{**problem, "loc": ("body", *problem["loc"])} for problem in found])
    )


def listed(problems: Sequence[Any]) -> list[dict[str, Any]]:
    """The first problems, each cut to a limited length."""
    return [_problem(problem) for problem in problems[:_MAX_PROBLEMS]]


def too_large(max_bytes: int) -> Refused:
    return Refused(413, f"the body is larger than {max_bytes} bytes; send fewer groups per request")


def _problem(problem: dict[str, Any]) -> dict[str, Any]:
    return {
        "loc": [
            part if isinstance(part, int) else str(part)[:_MAX_LOCATION_CHARS]
            for part in problem["loc"]
        ],
        "msg": message_of(problem)[:_MAX_MESSAGE_CHARS],
        "type": problem["type"],
    }
