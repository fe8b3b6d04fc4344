"""Routes that accept scored groups."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from grpo_api.delivery.stream import group_answer
from grpo_api.errors import GroupRefused
from grpo_api.http.middleware import accepts_gzip
from grpo_api.http.openapi import json_body, refusals
from grpo_api.ingest.decode import Decode, decode_group, decode_groups
from grpo_api.routes.dependencies import (
    AppServices,
    IdempotencyKey,
    Services,
    checked_key,
    services_of,
)
from grpo_api.routes.responses import (
    GroupBuffered,
    GroupReceived,
    GroupsReceived,
    NoExample,
    ServedGroup,
)
from grpo_api.store.results import Outcomes, Submission
from grpo_core.wire.scored_group import ScoredGroup

router = APIRouter()

_REFUSALS = refusals(400, 409, 413, 422, 503)


class DirectRoute(APIRoute):
    """Calls its endpoint with the request alone, without resolving parameters.

    That saves 7 % of the most frequent request. The parameters are declared only for the OpenAPI
    document; the endpoint reads them itself.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return endpoint


async def scored_data(request: Request, idempotency_key: IdempotencyKey = None) -> Response:
    """Submit one group or a partial group. If no trainer has registered, run-api refuses the group
    with status 409."""
    key = checked_key(request.headers.get("idempotency-key", idempotency_key))
    try:
        (buffered,) = await _submit(request, services_of(request), decode_group, key)
    except GroupRefused as error:
        raise error.at("tokens") from error
    if buffered is None:
        return Response(b'{"status":"received"}', media_type="application/json")
    return JSONResponse({"status": "buffered", "buffer_size": buffered})


router.add_api_route(
    "/scored_data",
    scored_data,
    methods=["POST"],
    response_model=GroupReceived | GroupBuffered,
    responses=_REFUSALS,
    openapi_extra=json_body(ScoredGroup),
    route_class_override=DirectRoute,
)


@router.post(
    "/scored_data_list", responses=_REFUSALS, openapi_extra=json_body(ScoredGroup, many=True)
)
async def scored_data_list(
    request: Request, services: Services, idempotency_key: IdempotencyKey = None
) -> GroupsReceived:
    """Submit a list of up to 1024 groups. run-api accepts either all groups of the list or none."""
    try:
        outcomes = await _submit(request, services, decode_groups, idempotency_key)
    except GroupRefused as error:
        raise error.at(error.index, "tokens") from error
    answer: GroupsReceived = {"status": "received", "groups_processed": len(outcomes)}
    buffered = [sequences for sequences in outcomes if sequences is not None]
    if buffered:
        answer["buffered"] = len(buffered)
        answer["last_buffer_size"] = buffered[-1]
    return answer


@router.get("/latest_example", responses={200: {"model": ServedGroup | NoExample}, **refusals(503)})
async def latest_example(
    services: Services, accept_encoding: Annotated[str, Header(include_in_schema=False)] = ""
) -> Any:
    """The newest group of the run, even if run-api has already handed out this group in a batch."""
    payload = await services.store.payloads.latest()
    if payload is None:
        return {name: [] for name in NoExample.model_fields}
    return group_answer(payload, accepts_gzip(accept_encoding))


async def _submit(
    request: Request, services: AppServices, decode: Decode, key: str | None
) -> Outcomes:
    decoder = services.decoder
    with services.bodies.incoming(request) as incoming:
        # no variable holds the body, so its memory is freed once it is decoded
        decoded = await decoder.decode(decode, await incoming.read(decoder.max_bytes))
        submission = Submission(decoded.groups, key, decoded.fingerprint)
        incoming.keep(submission.stored_bytes)
        return await services.intake.submit(submission)
