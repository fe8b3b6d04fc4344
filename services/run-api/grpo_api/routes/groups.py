"""Routes that accept scored groups."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from grpo_api.batches import group_answer
from grpo_api.errors import GroupRefused, Refused
from grpo_api.http.middleware import accepts_gzip
from grpo_api.routes.dependencies import (
    IdempotencyKey,
    RunUuid,
    Services,
    checked_key,
    services_of,
)
from grpo_api.routes.openapi import json_body, refusals
from grpo_api.routes.responses import (
    GroupBuffered,
    GroupReceived,
    GroupsReceived,
    NoExample,
    ServedGroup,
)
from grpo_api.store.results import Outcomes, Submission
from grpo_api.store.stats import Refusal
from grpo_api.submissions.decode import Decode, Decoded, decode_group, decode_groups
from grpo_core.wire.run_api import RUN_UUID_HEADER
from grpo_core.wire.scored_group import ScoredGroup

router = APIRouter()

_REFUSALS = refusals(400, 409, 413, 422, 503)


class DirectRoute(APIRoute):
    """Calls its endpoint with the request alone, without resolving parameters.

    That saves 7 % of the most frequent request, and `_submit` also counts requests with an invalid
    key. The parameters are declared only for the OpenAPI document; the endpoint reads them itself.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return endpoint


async def scored_data(
    request: Request,
    idempotency_key: IdempotencyKey = None,  # noqa: ARG001
    run_uuid: RunUuid = None,  # noqa: ARG001
) -> Response:
    """Submit one group or a partial group. If no trainer has registered, or if the group is of
    another run, run-api refuses the group with status 409."""
    try:
        (buffered,) = await _submit(request, decode_group)
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


async def scored_data_list(
    request: Request,
    idempotency_key: IdempotencyKey = None,  # noqa: ARG001
    run_uuid: RunUuid = None,  # noqa: ARG001
) -> Response:
    """Submit a list of up to 1024 groups. run-api accepts either all groups of the list or none."""
    try:
        outcomes = await _submit(request, decode_groups)
    except GroupRefused as error:
        raise error.at(error.index, "tokens") from error
    answer: GroupsReceived = {"status": "received", "groups_processed": len(outcomes)}
    buffered = [sequences for sequences in outcomes if sequences is not None]
    if buffered:
        answer["buffered"] = len(buffered)
        answer["last_buffer_size"] = buffered[-1]
    return JSONResponse(answer)


router.add_api_route(
    "/scored_data_list",
    scored_data_list,
    methods=["POST"],
    response_model=GroupsReceived,
    responses=_REFUSALS,
    openapi_extra=json_body(ScoredGroup, many=True),
    route_class_override=DirectRoute,
)


@router.get("/latest_example", responses={200: {"model": ServedGroup | NoExample}, **refusals(503)})
async def latest_example(
    services: Services, accept_encoding: Annotated[str, Header(include_in_schema=False)] = ""
) -> Any:
    """The newest group of the run, even if run-api has already handed out this group in a batch."""
    payload = await services.store.payloads.latest()
    if payload is None:
        return {name: [] for name in NoExample.model_fields}
    return group_answer(payload, accepts_gzip(accept_encoding))


async def _submit(request: Request, decode: Decode) -> Outcomes:
    """Accept the groups of a request, or count and raise its refusal."""
    services = services_of(request)
    key: str | None = None
    decoded: Decoded | None = None
    decoder = services.decoder
    with services.bodies.incoming(request) as incoming:
        try:
            key = checked_key(request.headers.get("idempotency-key"))
            # no variable holds the body, so its memory is freed once it is decoded
            decoded = await decoder.decode(decode, await incoming.read(decoder.max_bytes))
            run_uuid = request.headers.get(RUN_UUID_HEADER, "")
            submission = Submission(decoded.groups, key, decoded.fingerprint, run_uuid=run_uuid)
            incoming.keep(submission.stored_bytes)
            return await services.intake.submit(submission)
        except (Refused, GroupRefused) as error:
            await services.store.stats.count_refusal(_refusal(error, decoded, key))
            raise


def _refusal(error: Refused | GroupRefused, decoded: Decoded | None, key: str | None) -> Refusal:
    reason = error.reason if isinstance(error, Refused) else str(error)
    if decoded is None:
        return Refusal(reason, key=key)
    index = error.index if isinstance(error, GroupRefused) else 0
    return Refusal(reason, len(decoded.groups), decoded.groups[index].env_id, key)
