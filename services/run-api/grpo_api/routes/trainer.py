"""Routes for the trainer: register, poll for a batch, acknowledge, information."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Annotated, Any, Literal

import structlog
from fastapi import APIRouter, Depends, Path, Query
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from grpo_api.batches import batch_json, next_batch
from grpo_api.errors import BatchUnknown, Refused, TrainerNotRegistered
from grpo_api.routes.openapi import ServedGroup, json_body, linked, refusals
from grpo_api.routes.requests import RegistrationBody, Services
from grpo_api.store.leases import BatchesAcknowledged, Poll
from grpo_core.wire.fields import UNSET, Step
from grpo_core.wire.run_api import (
    EnvironmentCount,
    Registration,
    TrainerEnrolled,
    TrainerInfo,
    WandbNames,
)

_MAX_WAIT_S = 60.0
_MAX_BATCH_ID = 2**53 - 1

router = APIRouter()
log = structlog.get_logger()

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


class _Streamed(BaseModel, extra="forbid"):
    """Only describes an answer that is sent as bytes; no instance is created."""


class NoBatch(_Streamed):
    """The answer if no batch is complete and the request has no parameter `trainer`."""

    batch: None


class NoLease(_Streamed):
    """The answer if no batch is complete and the request has the parameter `trainer`.
    `environments` counts the environments of the run."""

    batch: None
    environments: EnvironmentCount


class PolledBatch(_Streamed):
    """A batch, if the request has no parameter `trainer`."""

    batch: list[ServedGroup]


class LeaseAnswer(_Streamed):
    """A leased batch, if the request has the parameter `trainer`.

    `received_under` contains one entry for each group: the policy version [epoch, step] that was
    served when run-api received the group, or null if the version is unknown.
    """

    batch_id: int = Field(ge=1)
    received_under: list[tuple[Step, Step] | None]
    batch: list[ServedGroup]


class TrainerMissing(_Streamed):
    """No trainer has registered, or the run was reset."""

    status: Literal["error"]
    message: str
    batch: list[ServedGroup] = Field(max_length=0)


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
    enrolled, step = await services.store.register_trainer(registration)
    log.info(
        "trainer.registered",
        batch_size=registration.batch_size,
        max_token_len=registration.max_token_len,
        step=step,
    )
    if step > 0 and registration.starting_step == 0:
        log.warning(
            "run.has_earlier_data",
            step=step,
            hint="this trainer starts at step 0, but an earlier trainer of this run has taken "
            "steps; to delete the earlier queue and batches, send GET /reset_data",
        )
    return enrolled


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
            claim = await until_answered.enter_async_context(services.store.leases.claim())
            poll = Poll(claim=claim)
        lease = await next_batch(services.store, services.closing, poll, wait_s)
    except TrainerNotRegistered as error:
        return {"status": "error", "message": str(error), "batch": []}
    if lease is None and trainer is not None:
        return NoLease(batch=None, environments=await services.store.environments())
    if lease is None:
        return {"batch": None}
    pieces = await batch_json(services.store, lease)
    return StreamingResponse(pieces, media_type="application/json")


@router.post("/batch/{batch_id}/ack", responses=refusals(404, 409, 422, 503))
async def acknowledge(
    batch_id: BatchId, trainer: TrainerId, services: Services
) -> BatchesAcknowledged:
    """Acknowledge batch `batch_id` and all earlier batches. run-api deletes these batches."""
    try:
        answer = await services.store.leases.acknowledge(trainer, batch_id)
    except BatchUnknown as error:
        raise Refused(404, error.detail) from error
    except TrainerNotRegistered as error:
        raise Refused(409, str(error)) from error
    if answer["released"]:
        log.info(
            "batches.acknowledged",
            last_batch_id=answer["acknowledged"],
            deleted_batches=answer["released"],
        )
    return answer


@router.get("/info", responses=refusals(503))
async def info(services: Services) -> TrainerInfo:
    """The `batch_size` and the `max_token_len` that the trainer registered. If no trainer has
    registered, `batch_size` and `max_token_len` are -1."""
    registration = await services.store.trainer()
    if registration is None:
        return TrainerInfo(batch_size=UNSET, max_token_len=UNSET)
    return TrainerInfo(batch_size=registration.batch_size, max_token_len=registration.max_token_len)


@router.get("/wandb_info", responses=refusals(503))
async def wandb_info(services: Services) -> WandbNames:
    """The group and the project that the trainer uses in Weights & Biases. If no trainer has
    registered, `group` and `project` are null."""
    registration = await services.store.trainer()
    if registration is None:
        return WandbNames(group=None, project=None)
    return WandbNames(group=registration.wandb_group, project=registration.wandb_project)
