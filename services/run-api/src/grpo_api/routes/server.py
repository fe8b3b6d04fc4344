"""The server itself: is it there, does it work, how far is the run, start over."""

from __future__ import annotations

import structlog
from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from grpo_api.dependencies import Store
from grpo_core.wire import ServerStatus

router = APIRouter()
_log = structlog.get_logger()


@router.get("/")
async def root() -> dict[str, str]:
    return {"message": "AtroposLib API"}


@router.get("/health")
async def health(store: Store) -> dict[str, str]:
    """200 only where Redis answers, else 503."""
    await store.ping()
    return {"status": "ok"}


@router.get("/status")
async def status(store: Store) -> ServerStatus:
    return await store.trainer.status()


@router.get("/reset_data")
async def reset_data(store: Store) -> PlainTextResponse:
    """Forget the run: registration, step, environments, buffers, queue, the batch handed out."""
    await store.reset()
    _log.info("reset")
    return PlainTextResponse("Reset successful")
