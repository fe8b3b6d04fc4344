"""Scored groups on their way in."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from starlette.concurrency import run_in_threadpool

from grpo_api.bodies import GroupBody, GroupsBody
from grpo_api.dependencies import GroupIntake, Store
from grpo_api.errors import GroupRefused
from grpo_api.payloads import NO_EXAMPLE, pack, unpack

router = APIRouter()


@router.post("/scored_data")
async def scored_data(group: GroupBody, intake: GroupIntake) -> dict[str, Any]:
    """Take one group; 409 before a trainer has registered."""
    try:
        (buffered,) = await intake.submit(await run_in_threadpool(pack, [group]))
    except GroupRefused as error:
        raise error.at("tokens") from error
    if buffered is None:
        return {"status": "received"}
    return {"status": "buffered", "buffer_size": buffered}


@router.post("/scored_data_list")
async def scored_data_list(groups: GroupsBody, intake: GroupIntake) -> dict[str, Any]:
    """Take all groups of the list, or none of them."""
    try:
        outcomes = await intake.submit(await run_in_threadpool(pack, groups))
    except GroupRefused as error:
        raise error.at(error.index, "tokens") from error
    answer: dict[str, Any] = {"status": "received", "groups_processed": len(groups)}
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
