"""Routes that accept scored groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NotRequired

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field
from typing_extensions import TypedDict  # pydantic accepts `typing.TypedDict` from Python 3.12 on

from grpo_api.batches import group_pieces
from grpo_api.decode import Decode, decode_group, decode_groups
from grpo_api.errors import GroupRefused, Refused
from grpo_api.routes.openapi import ServedGroup, json_body, refusals
from grpo_api.routes.requests import (
    IdempotencyKey,
    IncomingBody,
    ItemPositions,
    RunUuid,
    Services,
    checked_key,
    checked_positions,
    services_of,
)
from grpo_api.store.queue import Outcomes, Submission
from grpo_core.wire.scored_group import ScoredGroup

router = APIRouter()

_REFUSALS = refusals(400, 408, 409, 413, 422, 503)


class GroupReceived(TypedDict):
    """The group is in the queue."""

    status: Literal["received"]


class GroupBuffered(TypedDict):
    """The group is partial. `buffer_size` is the number of sequences in all partial groups of the
    environment."""

    status: Literal["buffered"]
    buffer_size: int


class GroupsReceived(TypedDict):
    status: Literal["received"]
    groups_processed: int
    buffered: NotRequired[int]
    last_buffer_size: NotRequired[int]


class NoExample(BaseModel, extra="forbid"):
    """No group has been queued yet: the answer has nine fields, each with an empty list."""

    tokens: list[None] = Field(max_length=0)
    masks: list[None] = Field(max_length=0)
    scores: list[None] = Field(max_length=0)
    advantages: list[None] = Field(max_length=0)
    ref_logprobs: list[None] = Field(max_length=0)
    generation_params: list[None] = Field(max_length=0)
    inference_logprobs: list[None] = Field(max_length=0)
    messages: list[None] = Field(max_length=0)
    images: list[None] = Field(max_length=0)


@router.post(
    "/scored_data",
    response_model=GroupReceived | GroupBuffered,
    responses=_REFUSALS,
    openapi_extra=json_body(ScoredGroup),
)
async def scored_data(
    request: Request,
    idempotency_key: IdempotencyKey = None,
    run_uuid: RunUuid = "",
    item_positions: ItemPositions = "",
) -> Response:
    """Submit one group or a partial group. If no trainer has registered, or if the group is of
    another run, run-api refuses the group with status 409."""
    (buffered,) = await _submit(request, decode_group, idempotency_key, run_uuid, item_positions)
    if buffered is None:
        return Response(b'{"status":"received"}', media_type="application/json")
    return JSONResponse({"status": "buffered", "buffer_size": buffered})


@router.post(
    "/scored_data_list",
    response_model=GroupsReceived,
    responses=_REFUSALS,
    openapi_extra=json_body(ScoredGroup, many=True),
)
async def scored_data_list(
    request: Request,
    idempotency_key: IdempotencyKey = None,
    run_uuid: RunUuid = "",
    item_positions: ItemPositions = "",
) -> Response:
    """Submit a list of up to 1024 groups. run-api accepts either all groups of the list or none."""
    outcomes = await _submit(request, decode_groups, idempotency_key, run_uuid, item_positions)
    answer: GroupsReceived = {"status": "received", "groups_processed": len(outcomes)}
    buffered = [sequences for sequences in outcomes if sequences is not None]
    if buffered:
        answer["buffered"] = len(buffered)
        answer["last_buffer_size"] = buffered[-1]
    return JSONResponse(answer)


@router.get("/latest_example", responses={200: {"model": ServedGroup | NoExample}, **refusals(503)})
async def latest_example(services: Services) -> Any:
    """The newest group of the run, even if run-api has already handed out this group in a batch."""
    payload = await services.store.payloads.latest()
    if payload is None:
        return {name: [] for name in NoExample.model_fields}
    return StreamingResponse(group_pieces(payload), media_type="application/json")


async def _submit(
    request: Request, decode: Decode, given_key: str | None, run_uuid: str, positions: str
) -> Outcomes:
    """Accept the groups of a request, or count and raise its refusal."""
    # No dependency of the route: FastAPI would resolve it for each of the most frequent requests.
    services = await services_of(request)
    key: str | None = None
    submission: Submission | None = None
    decoder = services.decoder
    with IncomingBody(services.bodies, request) as incoming:
        try:
            key = checked_key(given_key)
            # No variable holds the body, so its memory is freed once it is decoded.
            submission = await decoder.decode(decode, await incoming.read(decoder.max_bytes))
            submission = replace(
                submission,
                key=key,
                run_uuid=run_uuid,
                item_positions=checked_positions(positions),
            )
            incoming.keep(submission.stored_bytes)
            return await services.intake.submit(submission, request.is_disconnected)
        except (Refused, GroupRefused) as error:
            reason = error.reason if isinstance(error, Refused) else str(error)
            groups = [] if submission is None else submission.groups
            at = error.index if isinstance(error, GroupRefused) else 0
            env_id = groups[at].env_id if groups else None
            await services.store.count_refusal(reason, len(groups) or 1, env_id, key)
            if isinstance(error, Refused):
                raise
            place = ["tokens"] if decode is decode_group else [at, "tokens"]
            raise error.at(*place) from error
