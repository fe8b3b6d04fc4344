"""The application: routes, request bodies, and what an error looks like on the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from grpo_api.bodies import BodyMiddleware
from grpo_api.compression import CompressionMiddleware
from grpo_api.dependencies import Services, bind_services
from grpo_api.dispatch import BatchDispatcher
from grpo_api.errors import Refused, StoreUnavailable
from grpo_api.intake import Intake
from grpo_api.routes import environments, groups, server, trainer
from grpo_api.settings import RunApiSettings
from grpo_api.store import RunStore

_RETRY_AFTER_S = 1
_MAX_PROBLEMS = 20
_MAX_MESSAGE_CHARS = 2000
_MAX_LOCATION_CHARS = 100


def create_app(store: RunStore, settings: RunApiSettings) -> FastAPI:
    """Build the application on `store`, which is closed when the application shuts down."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        await store.close()

    app = FastAPI(
        title="run-api", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None
    )
    services = Services(
        store=store,
        dispatcher=BatchDispatcher(store),
        intake=Intake(store, patience_s=settings.redis_deadline_s),
    )
    bind_services(app, services)
    for routes in (server, trainer, environments, groups):
        app.include_router(routes.router)
    app.add_middleware(BodyMiddleware, max_body_bytes=settings.max_body_bytes)
    app.add_middleware(CompressionMiddleware)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(StoreUnavailable, _unavailable)
    return app


async def _invalid(_request: Request, error: Exception) -> JSONResponse:
    """422 without the offending input: a NaN in it could not be written as JSON."""
    assert isinstance(error, RequestValidationError)
    problems = [_problem(problem) for problem in error.errors()[:_MAX_PROBLEMS]]
    return JSONResponse({"detail": problems}, status_code=422)


def _problem(problem: dict[str, Any]) -> dict[str, Any]:
    return {
        "loc": [
            part if isinstance(part, int) else str(part)[:_MAX_LOCATION_CHARS]
            for part in problem["loc"]
        ],
        "msg": problem["msg"][:_MAX_MESSAGE_CHARS],
        "type": problem["type"],
    }


async def _refused(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refused)
    return JSONResponse({"detail": error.detail}, status_code=error.status)


async def _unavailable(_request: Request, error: Exception) -> JSONResponse:
    return JSONResponse(
        {"detail": str(error)}, status_code=503, headers={"Retry-After": str(_RETRY_AFTER_S)}
    )
