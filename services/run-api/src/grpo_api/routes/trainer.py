"""What a trainer asks, and what others ask about it."""

from __future__ import annotations

from typing import Any

import structlog
from fastapi import APIRouter, Response
from starlette.concurrency import run_in_threadpool

from grpo_api.bodies import RegistrationBody
from grpo_api.dependencies import Dispatcher, Store
from grpo_api.enrolment import enrol_trainer
from grpo_api.errors import TrainerNotRegistered
from grpo_api.payloads import batch_json
from grpo_core.wire import TrainerInfo

_NOTHING_REGISTERED = -1

router = APIRouter()
_log = structlog.get_logger()


@router.post("/register")
async def register(registration: RegistrationBody, store: Store) -> dict[str, int]:
    """Register a trainer; a batch it has not acknowledged is handed out again."""
    registered = await enrol_trainer(store, registration)
    _log.info(
        "registered",
        batch_size=registration.batch_size,
        max_token_len=registration.max_token_len,
        step=registered.step,
    )
    return {"uuid": registered.trainer_id}


@router.get("/batch")
async def batch(dispatcher: Dispatcher) -> Any:
    """Hand out the next batch, or `{"batch": null}`. Either acknowledges the batch before."""
    try:
        leased = await dispatcher.next_batch()
    except TrainerNotRegistered:
        return {
            "status": "error",
            "message": "Trainer not registered. Call /register first.",
            "batch": [],
        }
    if leased is None:
        return {"batch": None}
    body = await run_in_threadpool(batch_json, leased.payloads)
    return Response(body, media_type="application/json")


@router.get("/info")
async def info(store: Store) -> TrainerInfo:
    registration = await store.trainer.registration()
    if registration is None:
        return TrainerInfo(batch_size=_NOTHING_REGISTERED, max_token_len=_NOTHING_REGISTERED)
    return TrainerInfo(batch_size=registration.batch_size, max_token_len=registration.max_token_len)


@router.get("/wandb_info")
async def wandb_info(store: Store) -> dict[str, str | None]:
    registration = await store.trainer.registration()
    if registration is None:
        return {"group": None, "project": None}
    return {"group": registration.wandb_group, "project": registration.wandb_project}
