"""Scored groups on their way in."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from starlette.concurrency import run_in_threadpool

from grpo_api.bodies import GroupBody, GroupsBody
from grpo_api.dependencies import Store
from grpo_api.errors import unprocessable
from grpo_api.payloads import NO_EXAMPLE, pack, unpack

router = APIRouter()


@router.post("/scored_data")
async def scored_data(group: GroupBody, store: Store) -> dict[str, str]:
    """Queue one group; 409 before a trainer has registered."""
    refused = await store.submit(await run_in_threadpool(pack, [group]))
    if refused is not None:
        raise unprocessable(["tokens"], refused.reason)
    return {"status": "received"}


@router.post("/scored_data_list")
async def scored_data_list(groups: GroupsBody, store: Store) -> dict[str, Any]:
    """Queue all groups of the list, or none of them."""
    refused = await store.submit(await run_in_threadpool(pack, groups))
    if refused is not None:
        raise unprocessable([refused.index, "tokens"], refused.reason)
    return {"status": "received", "groups_processed": len(groups)}


@router.get("/latest_example")
async def latest_example(store: Store) -> Any:
    """The last queued group, also after it was served."""
    payload = await store.latest_payload()
    if payload is None:
        return NO_EXAMPLE
    return Response(unpack(payload), media_type="application/json")
