"""Routes for the trainer: register, poll for a batch, acknowledge, information."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Annotated, Any

import structlog
from fastapi import APIRouter, Depends, Path, Query
from fastapi.responses import StreamingResponse

from grpo_api.dispatcher import batch_pieces, begun
from grpo_api.errors import BatchUnknown, Refused, TrainerNotRegistered
from grpo_api.routes.openapi import json_body, linked, refusals
from grpo_api.routes.requests import RegistrationBody, Services
from grpo_api.routes.responses import (
    BatchesAcknowledged,
    LeaseAnswer,
    NoBatch,
    NoLease,
    PolledBatch,
    TrainerMissing,
    TrainerNames,
)
from grpo_api.store import RunStore
from grpo_api.store.leases import Lease, Poll
from grpo_core.wire.run_api import Registration, TrainerEnrolled, TrainerInfo

_NOTHING_REGISTERED = -1
_MAX_WAIT_S = 60.0
_MAX_BATCH_ID = 2**53 - 1

router = APIRouter()
_log = structlog.get_logger()

TrainerId = Annotated[
    int, Query(ge=0, lt=2**128, description="the trainer's `uuid`, which /register returned")
]
After = Annotated[
    int,
    Query(
        ge=0,
        le=_MAX_BATCH_ID,
        description="id of the newest batch that the trainer has received; 0 before the first "
        "batch",
    ),
]
WaitS = Annotated[
    float,
    Query(
        ge=0.0,
        le=_MAX_WAIT_S,
        description="longest time, in seconds, that run-api waits for a complete batch before it "
        "answers",
    ),
]
BatchesLeft = Annotated[
    int | None,
    Query(
        ge=0,
        le=_MAX_BATCH_ID,
        description="number of batches that the run still needs after the batch whose id is "
        "in `after`. From this number, run-api computes `num_steps` in the responses to "
        "`GET /status-env`",
    ),
]
BatchId = Annotated[
    int, Path(ge=1, le=_MAX_BATCH_ID, description="id of the newest batch to acknowledge")
]


async def _until_answered() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


UntilAnswered = Annotated[AsyncExitStack, Depends(_until_answered)]
"""Contexts entered here end when the answer has been sent or cut off."""

_UUID = "$response.body#/uuid"
_ENROLLED: dict[int | str, dict[str, Any]] = {
    200: {"links": {"batches": linked("batch", trainer=_UUID)}}
}
_HANDED_OUT: dict[int | str, dict[str, Any]] = {
    200: {
        "model": NoBatch | NoLease | PolledBatch | LeaseAnswer | TrainerMissing,
        "links": {
            "next": linked(
                "batch", trainer="$request.query.trainer", after="$response.body#/batch_id"
            ),
            "acknowledgement": linked(
                "acknowledge",
                trainer="$request.query.trainer",
                batch_id="$response.body#/batch_id",
            ),
        },
    }
}


@router.post(
    "/register",
    responses=_ENROLLED | refusals(400, 408, 409, 413, 422, 503),
    openapi_extra=json_body(Registration),
)
async def register(registration: RegistrationBody, services: Services) -> TrainerEnrolled:
    """Register a trainer. run-api then hands out all unacknowledged batches again."""
    registered = await services.store.registrations.register_trainer(registration)
    _log.info(
        "trainer.registered",
        batch_size=registration.batch_size,
        max_token_len=registration.max_token_len,
        step=registered.step,
    )
    if registered.step > 0 and registration.starting_step == 0:
        _log.warning(
            "run.has_earlier_data",
            step=registered.step,
            hint="this trainer starts at step 0, but an earlier trainer of this run has taken "
            "steps; to delete the earlier queue and batches, send GET /reset_data",
        )
    return TrainerEnrolled(uuid=registered.trainer_id, run_uuid=registered.run_uuid)


@router.get("/batch", responses=_HANDED_OUT | refusals(409, 422, 503))
async def batch(
    services: Services,
    until_answered: UntilAnswered,
    trainer: TrainerId | None = None,
    after: After = 0,
    wait_s: WaitS = 0.0,
    batches_left: BatchesLeft = None,
) -> Any:
    """Take the next batch, which has `batch_size` sequences from the oldest groups of the queue.

    A request with the parameter `trainer` leases the batch that follows batch `after`. Repeated
    requests with the same `after` get the same batch.

    A request without the parameter `trainer` acknowledges all batches that run-api has
    already sent in full. Concurrent requests without `trainer` get different batches.
    """
    try:
        poll = Poll(trainer, after, batches_left)
        if trainer is None:
            claim = await until_answered.enter_async_context(services.store.batches.claim())
            poll = Poll(claim=claim)
        lease = await services.dispatcher.next_batch(poll, wait_s)
    except TrainerNotRegistered as error:
        return {"status": "error", "message": str(error), "batch": []}
    if lease is None and trainer is not None:
        return NoLease(batch=None, environments=await services.store.stats.environments())
    if lease is None:
        return {"batch": None}
    pieces = await begun(batch_pieces(services.store.payloads, lease))
    if trainer is None:
        pieces = _noting_delivery(pieces, services.store, lease)
    return StreamingResponse(pieces, media_type="application/json")


async def _noting_delivery(
    pieces: AsyncIterator[bytes], store: RunStore, lease: Lease
) -> AsyncIterator[bytes]:
    async for piece in pieces:
        yield piece
    await store.batches.mark_delivered(lease)


@router.post("/batch/{batch_id}/ack", responses=refusals(404, 409, 422, 503))
async def acknowledge(
    batch_id: BatchId, trainer: TrainerId, services: Services
) -> BatchesAcknowledged:
    """Acknowledge batch `batch_id` and all earlier batches. run-api deletes these batches."""
    try:
        acknowledged = await services.store.batches.acknowledge(trainer, batch_id)
    except BatchUnknown as error:
        raise Refused(404, error.detail) from error
    except TrainerNotRegistered as error:
        raise Refused(409, str(error)) from error
    if acknowledged.released:
        _log.info(
            "batches.acknowledged",
            last_batch_id=acknowledged.batch_id,
            deleted_batches=acknowledged.released,
        )
    return {
        "status": "success",
        "acknowledged": acknowledged.batch_id,
        "released": acknowledged.released,
    }


@router.get("/info", responses=refusals(503))
async def info(services: Services) -> TrainerInfo:
    """The `batch_size` and the `max_token_len` that the trainer registered. If no trainer has
    registered, `batch_size` and `max_token_len` are -1."""
    registration = await services.store.registrations.trainer()
    if registration is None:
        return TrainerInfo(batch_size=_NOTHING_REGISTERED, max_token_len=_NOTHING_REGISTERED)
    return TrainerInfo(batch_size=registration.batch_size, max_token_len=registration.max_token_len)


@router.get("/wandb_info", responses=refusals(503))
async def wandb_info(services: Services) -> TrainerNames:
    """The group and the project that the trainer uses in Weights & Biases. If no trainer has
    registered, `group` and `project` are null."""
    registration = await services.store.registrations.trainer()
    if registration is None:
        return {"group": None, "project": None}
    return {"group": registration.wandb_group, "project": registration.wandb_project}
