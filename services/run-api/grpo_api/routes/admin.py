"""Routes for probes, metrics, the status of the run and its reset."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Literal

import structlog
from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from typing_extensions import TypedDict  # pydantic accepts `typing.TypedDict` from Python 3.12 on

from grpo_api.errors import ShuttingDown, StoreUnavailable
from grpo_api.metrics import RunScrape
from grpo_api.routes.openapi import refusals
from grpo_api.routes.requests import Services
from grpo_core.wire.run_api import RunStatus

_SCRAPE_DEADLINE_S = 1.0
_TEXT = {"schema": {"type": "string"}}
_EXPOSITION: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": _TEXT, "application/openmetrics-text": _TEXT}}
}

router = APIRouter()
log = structlog.get_logger()


class Greeting(TypedDict):
    message: Literal["AtroposLib API"]


class Healthy(TypedDict):
    status: Literal["ok"]


@router.get("/")
async def root() -> Greeting:
    """Answers like the server of Atropos, whose clients use the route `GET /` as a health check."""
    return {"message": "AtroposLib API"}


@router.get("/health", responses=refusals(503))
async def health(services: Services) -> Healthy:
    """Answers with status 200 if Redis answers, else 503."""
    await services.store.link.ping()
    return {"status": "ok"}


@router.get("/healthz")
async def healthz() -> Healthy:
    """Answers with status 200 while run-api runs, even if Redis does not answer."""
    return {"status": "ok"}


@router.get("/readyz", responses=refusals(503))
async def readyz(services: Services) -> Healthy:
    """Answers with status 200 if Redis answers and run-api is not stopping, else 503."""
    if services.closing.is_set():
        raise ShuttingDown
    await services.store.link.ping()
    return {"status": "ok"}


@router.get("/metrics", response_class=Response, responses=_EXPOSITION)
async def metrics(services: Services, request: Request) -> Response:
    """Prometheus metrics of the run and of the run-api process. If Redis does not answer, run-api
    leaves out the metrics of the run."""
    run: RunScrape | None = None
    store = services.store
    with suppress(StoreUnavailable, TimeoutError):
        async with asyncio.timeout(_SCRAPE_DEADLINE_S):
            run = RunScrape(
                await store.stats(),
                await store.servers.counted(),
                await store.link.append_only_file_bytes(),
            )
    return services.metrics.exposition(run, request.headers.get("accept", ""))


@router.get("/status", responses=refusals(503))
async def status(services: Services) -> RunStatus:
    """The run's step, and the number of groups in the queue. If no trainer has registered for the
    run, `run_uuid` is null."""
    return await services.store.status()


@router.get("/reset_data", response_class=PlainTextResponse, responses=refusals(503))
async def reset_data(services: Services) -> PlainTextResponse:
    """Delete the run: registration, step, environments, partial groups, queue and batches. The
    method is GET because clients of Atropos' server call it so."""
    await services.store.reset()
    log.info("run.deleted", deleted="queue, batches and registrations")
    return PlainTextResponse("Reset successful")
