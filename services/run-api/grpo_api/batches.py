"""Hands batches to trainers: plans and leases them, and streams their groups.

A plan is made from metadata and then committed in Redis. If the run changed in between, the next
plan is made.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import structlog
from starlette.concurrency import run_in_threadpool

from grpo_api.errors import BatchGone
from grpo_api.planning.batch_plan import Demand, plan_batch
from grpo_api.store.keys import entry_age, parse_kind
from grpo_api.store.leases import Lease, PlanLost, Poll
from grpo_api.store.payloads import unpack, unpacked_bytes
from grpo_api.store.run import RunStore
from grpo_api.waiting import is_set_within
from grpo_core.deadline import Deadline

_MAX_PLANS = 8
_POLL_S = 0.01
_PLAN_SHARE = 0.2
"""Largest share of the time that a waiting request may spend on plans that give no batch."""
_PLAN_AT_LEAST_EVERY_S = 1.0
"""When an environment stops polling, the minimums of a batch change without any new group."""
_PLANNED_INLINE = 2_000
"""Entries that are planned in a few milliseconds. Other requests must not wait for longer plans."""
_GROUPS_AT_A_TIME = 8
_PIECE_BYTES = 256 * 1024
"""Bytes that are compressed before other requests get a turn: about a millisecond."""
_UNPACKED_INLINE = 1024 * 1024
"""Bytes of JSON that take a millisecond or two. Larger groups are unpacked in a thread;
decompression releases the interpreter lock."""

log = structlog.get_logger()


async def next_batch(
    store: RunStore, closing: asyncio.Event, poll: Poll, wait_s: float
) -> Lease | None:
    """Return the unacknowledged batch after `poll.after`, or form a new one.

    None if no batch was complete within `wait_s`. Repeating the call returns the same batch.

    A plain poll acknowledges every batch that was delivered in full. A batch that was not is
    handed out again, unless another poll's answer is still sending it.

    Raises:
        TrainerNotRegistered, BatchUnknown, Conflict, StoreUnavailable: as `Leases.open_poll`.
    """
    if poll.trainer_id is None:
        await store.leases.acknowledge(None)
    deadline = Deadline(wait_s)
    while True:
        arrivals = await store.leases.arrivals() if wait_s else 0
        began = time.monotonic()
        lease = await _formed(store, poll)
        if lease is not None:
            log.info(
                "batch.handed_out",
                batch_id=lease.batch_id,
                step=lease.step,
                groups=len(lease.groups),
                sequences=lease.sequences,
                age_s=round(lease.age_at_lease_s, 3),
                handed_out_before=lease.again,
            )
            return lease
        # Wait for a reason to plan again.
        now = time.monotonic()
        poll_s, plan_at = max(_POLL_S, (now - began) / _PLAN_SHARE), now + _PLAN_AT_LEAST_EVERY_S
        is_changed = False
        while not is_changed:
            if deadline.has_passed or await is_set_within(poll_s, closing):
                return None
            is_changed = time.monotonic() >= plan_at or await store.leases.arrivals() != arrivals


async def _formed(store: RunStore, poll: Poll) -> Lease | None:
    for _ in range(_MAX_PLANS):
        opened = await store.leases.open_poll(poll)
        if isinstance(opened, Lease):
            return opened
        run = await store.view()
        entries = await store.leases.candidates(opened.batch_size)
        if len(entries) <= _PLANNED_INLINE:
            chosen = _planned(entries, run.demand())
        else:
            chosen = await run_in_threadpool(_planned, entries, run.demand())
        if chosen is None:
            return None
        with suppress(PlanLost):
            return await store.leases.lease(opened, chosen)
    return None


async def batch_json(store: RunStore, lease: Lease) -> AsyncIterator[bytes]:
    """The JSON of a batch in pieces; without its first group the answer does not start, so that
    a failure can set the status.

    Raises:
        BatchGone: the batch was acknowledged, or the run was reset.
        StoreUnavailable
    """
    pieces = _pieces(store, lease)
    first = [await anext(pieces), await anext(pieces)]

    async def all_of_it() -> AsyncIterator[bytes]:
        for piece in first:
            yield piece
        async for piece in pieces:
            yield piece

    return all_of_it()


async def _pieces(store: RunStore, lease: Lease) -> AsyncIterator[bytes]:
    """Yield the JSON `{"batch":[group, ...]}` without parsing the groups.

    The JSON of a batch that a trainer leased by its id begins with `batch_id` and
    `received_under`. A plain poll's batch counts as delivered when all of it was sent.
    """
    if lease.claim:
        yield b'{"batch":['
    else:
        received_under = [group.received_under for group in lease.groups]
        under = json.dumps(received_under, separators=(",", ":"))
        yield f'{{"batch_id":{lease.batch_id},"received_under":{under},"batch":['.encode()
    for start in range(0, len(lease.groups), _GROUPS_AT_A_TIME):
        group_ids = [group.id for group in lease.groups[start : start + _GROUPS_AT_A_TIME]]
        separator = b"," if start else b""
        async for payload in store.payloads.load(group_ids):
            if payload is None:
                raise BatchGone(lease.batch_id)
            if separator:
                yield separator
            separator = b","
            async for piece in group_pieces(payload):
                yield piece
    yield b"]}"
    if lease.claim:
        await store.leases.mark_delivered(lease)


async def group_pieces(payload: bytes) -> AsyncIterator[bytes]:
    """Yield the JSON of one group in pieces."""
    is_small = unpacked_bytes(payload) <= _UNPACKED_INLINE
    text = unpack(payload) if is_small else await run_in_threadpool(unpack, payload)
    for at in range(0, len(text), _PIECE_BYTES):
        yield text[at : at + _PIECE_BYTES]
        # A send returns without a pause while the socket accepts data, so give others a turn.
        await asyncio.sleep(0)


def _planned(entries: list[bytes], demand: Demand) -> list[bytes] | None:
    """The entries of the next batch. Args: entries: of the queue, in any order"""
    by_age = sorted(entries, key=entry_age)
    chosen = plan_batch([parse_kind(entry) for entry in by_age], demand)
    return None if chosen is None else [by_age[i] for i in chosen]
