"""What an error looks like on the wire."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from grpo_api.errors import (
    BatchesByLease,
    BatchGone,
    BatchUnknown,
    BodiesFull,
    BodyTooSlow,
    LeasesFull,
    QueueFull,
    Refused,
    StoreUnavailable,
    TrainerSuperseded,
)
from grpo_api.http.lifetime import ShuttingDown
from grpo_api.http.problems import listed
from grpo_api.http.request_log import CLIENT_CLOSED_REQUEST, unhandled

_RETRY_AFTER_S = 1
_CONFLICTS = (TrainerSuperseded, BatchesByLease, BatchUnknown, BatchGone)
_LATER = (StoreUnavailable, QueueFull, BodiesFull, ShuttingDown)


def answer_errors(app: FastAPI) -> None:
    """Let every error that a handler raises end in the answer that it stands for."""
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(LeasesFull, _leases_full)
    app.add_exception_handler(BodyTooSlow, _too_slow)
    for conflict in _CONFLICTS:
        app.add_exception_handler(conflict, _conflict)
    for later in _LATER:
        app.add_exception_handler(later, _unavailable)
    app.add_exception_handler(ClientDisconnect, _nobody_there)
    app.add_exception_handler(Exception, unhandled)


async def _invalid(_request: Request, error: Exception) -> JSONResponse:
    """422 without the offending input: a NaN in it could not be written as JSON."""
    assert isinstance(error, RequestValidationError)
    return JSONResponse({"detail": listed(error.errors())}, status_code=422)


async def _refused(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refused)
    return JSONResponse({"detail": error.detail}, status_code=error.status)


async def _conflict(_request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, status_code=409)


async def _leases_full(_request: Request, error: Exception) -> JSONResponse:
    problem = {"loc": ["query", "after"], "msg": str(error), "type": "leases_full"}
    return JSONResponse({"detail": [problem]}, status_code=409)


async def _too_slow(_request: Request, error: Exception) -> JSONResponse:
    """Without closing it, the connection would go on waiting for the rest."""
    return JSONResponse({"detail": str(error)}, status_code=408, headers={"Connection": "close"})


async def _unavailable(_request: Request, error: Exception) -> JSONResponse:
    return JSONResponse(
        {"detail": str(error)}, status_code=503, headers={"Retry-After": str(_RETRY_AFTER_S)}
    )


async def _nobody_there(_request: Request, _error: Exception) -> Response:
    """For the log and the metrics: who left in the middle of a body reads no answer."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)
