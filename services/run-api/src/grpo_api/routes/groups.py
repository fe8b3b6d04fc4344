"""Scored groups on their way in."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Request, Response

from grpo_api.bodies import read_body
from grpo_api.decoding import Decode, Decoded, decode_group, decode_groups
from grpo_api.dependencies import Decoder, GroupIntake, Store
from grpo_api.errors import GroupRefused
from grpo_api.intake import Submission
from grpo_api.payloads import NO_EXAMPLE, unpack
from grpo_api.records import Receipt

router = APIRouter()

IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=255,
        pattern=r"^[!-~]+$",
        description="names this submission: repeated with the same key it is queued once",
    ),
]


def _decoded_by(decode: Decode) -> Any:
    async def decoded(request: Request, decoder: Decoder) -> Decoded:
        return await decoder.decode(decode, await read_body(request, decoder.max_bytes))

    return Depends(decoded)


@router.post("/scored_data")
async def scored_data(
    decoded: Annotated[Decoded, _decoded_by(decode_group)],
    intake: GroupIntake,
    idempotency_key: IdempotencyKey = None,
) -> dict[str, Any]:
    """Take one group; 409 before a trainer has registered."""
    try:
        (buffered,) = await intake.submit(_submission(decoded, idempotency_key))
    except GroupRefused as error:
        raise error.at("tokens") from error
    if buffered is None:
        return {"status": "received"}
    return {"status": "buffered", "buffer_size": buffered}


@router.post("/scored_data_list")
async def scored_data_list(
    decoded: Annotated[Decoded, _decoded_by(decode_groups)],
    intake: GroupIntake,
    idempotency_key: IdempotencyKey = None,
) -> dict[str, Any]:
    """Take all groups of the list, or none of them."""
    try:
        outcomes = await intake.submit(_submission(decoded, idempotency_key))
    except GroupRefused as error:
        raise error.at(error.index, "tokens") from error
    answer: dict[str, Any] = {"status": "received", "groups_processed": len(decoded.groups)}
    buffered = [sequences for sequences in outcomes if sequences is not None]
    if buffered:
        answer |= {"buffered": len(buffered), "last_buffer_size": buffered[-1]}
    return answer


@router.get("/latest_example")
async def latest_example(store: Store) -> Any:
    """The last queued group, also after it was served."""
    payload = await store.groups.latest_payload()
    if payload is None:
        return NO_EXAMPLE
    return Response(unpack(payload), media_type="application/json")


def _submission(decoded: Decoded, key: str | None) -> Submission:
    return Submission(decoded.groups, Receipt(key, decoded.fingerprint))
