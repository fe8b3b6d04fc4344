"""Registers trainers and hands out batches to them.

Both plan from metadata, then commit in Redis. If the run changed in between, they plan again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import structlog
from isal import isal_zlib
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from grpo_api.errors import BatchGone, Refused, StoreUnavailable
from grpo_api.lifetime import Lifetime
from grpo_api.planning.batch import Bundle, batch_size_conflicts, plan_batch
from grpo_api.planning.run import RunView
from grpo_api.store import RunStore
from grpo_api.store.keys import parse_queue
from grpo_api.store.payloads import PayloadStore, unpack, unpacked_bytes
from grpo_api.store.results import BatchSizeDiffers, DueBatch, OpenPoll, PlanLost, Poll, Registered
from grpo_core.deadline import Deadline
from grpo_core.wire.run_api import Registration

_MAX_PLANS = 8
_POLL_S = 0.01
_PLAN_SHARE = 0.2
"""Largest share of the time that a waiting request may spend on plans that give no batch."""
_PLAN_AT_LEAST_EVERY_S = 1.0
"""When an environment stops polling, the minimums of a batch change without any new group."""
_PLANNED_INLINE = 500
"""Up to this many queue entries are planned on the event loop: that takes milliseconds."""

_log = structlog.get_logger()


async def enrol_trainer(store: RunStore, registration: Registration) -> Registered:
    """Carry out `POST /register`.

    Raises:
        Refused: 409, the queued groups or environments do not fit the new batch size.
        StoreUnavailable: Redis is unreachable, or the run changed during the check.
    """
    outcome = await store.trainer.register(registration)
    if isinstance(outcome, BatchSizeDiffers):
        await _check_batch_size(store, registration.batch_size, outcome)
        outcome = await store.trainer.register(registration, approved=outcome.fingerprint)
    if isinstance(outcome, BatchSizeDiffers):
        raise StoreUnavailable(
            "the queue or the environments changed while run-api checked batch_size "
            f"{registration.batch_size}; register again"
        )
    return outcome


async def _check_batch_size(store: RunStore, batch_size: int, differs: BatchSizeDiffers) -> None:
    run = await store.environments.view()
    group_size_of = {e.env_id: e.registration.group_size for e in run.connected()}
    reasons = batch_size_conflicts(batch_size, group_size_of, run.counters.queued)
    if differs.unacknowledged:
        reasons.insert(
            0,
            f"{differs.unacknowledged} batches of {differs.current} sequences are unacknowledged",
        )
    if reasons:
        raise Refused(
            409,
            f"the run's batch_size cannot change from {differs.current} to {batch_size}, because "
            f"{'; '.join(reasons)}. Register with batch_size {differs.current}, use another run "
            "id, or clear the run with GET /reset_data",
        )


class BatchDispatcher:
    """Carries out `GET /batch`."""

    def __init__(self, store: RunStore, lifetime: Lifetime) -> None:
        self._store = store
        self._lifetime = lifetime

    async def next_batch(self, poll: Poll, wait_s: float) -> DueBatch | None:
        """Return the unacknowledged batch after `poll.after`, or form a new one.

        None if no batch was complete within `wait_s`. Repeating the call returns the same batch.

        Raises:
            TrainerNotRegistered, TrainerSuperseded, BatchUnknown, LeasesFull, StoreUnavailable
        """
        deadline = Deadline(wait_s)
        while True:
            arrivals = await self._store.batches.arrivals() if wait_s else 0
            began = time.monotonic()
            due = await self._next(poll)
            if due is not None:
                lease = due.lease
                _log.info(
                    "batch.handed_out",
                    batch_id=lease.batch_id,
                    step=lease.step,
                    groups=len(lease.group_ids),
                    sequences=lease.sequences,
                    age_s=round(lease.age_at_lease_s, 3),
                    handed_out_before=due.again,
                )
                return due
            poll_s = max(_POLL_S, (time.monotonic() - began) / _PLAN_SHARE)
            if not await self._wait_for_change(arrivals, deadline, poll_s):
                return None

    async def by_plain_poll(self, answer: str, wait_s: float) -> DueBatch | None:
        """The same for a plain poll: one without a trainer id, which cannot acknowledge.

        A plain poll acknowledges every batch that was delivered in full. A batch that was not is
        handed out again, unless another answer is still sending it. So concurrent plain polls get
        different batches.

        Args:
            answer: from `BatchStore.answering`, which must last until the batch is sent.
        Raises:
            TrainerNotRegistered, BatchesByLease, StoreUnavailable
        """
        await self._store.batches.acknowledge(None)
        return await self.next_batch(Poll(answer=answer), wait_s)

    async def _wait_for_change(self, arrivals: int, deadline: Deadline, poll_s: float) -> bool:
        """Wait for a reason to plan again; False if the deadline or a shutdown came first."""
        plan_at = time.monotonic() + _PLAN_AT_LEAST_EVERY_S
        while not deadline.has_passed:
            if await self._lifetime.closes_within(poll_s):
                return False
            if time.monotonic() >= plan_at or await self._store.batches.arrivals() != arrivals:
                return True
        return False

    async def _next(self, poll: Poll) -> DueBatch | None:
        for _ in range(_MAX_PLANS):
            opened = await self._store.batches.open_poll(poll)
            if isinstance(opened, DueBatch):
                return opened
            outcome = await self._plan_and_lease(opened)
            if outcome is PlanLost.SUPERSEDED and poll.trainer_id is None:
                return None  # the queue now belongs to a trainer that registered since
            if not isinstance(outcome, PlanLost):
                return outcome
        return None

    async def _plan_and_lease(self, opened: OpenPoll) -> DueBatch | PlanLost | None:
        run = await self._store.environments.view()
        entries = await self._store.batches.candidates(opened.batch_size)
        if len(entries) <= _PLANNED_INLINE:
            bundles = _plan(entries, run)
        else:
            bundles = await run_in_threadpool(_plan, entries, run)
        return None if bundles is None else await self._store.batches.lease(opened, bundles)


def _plan(entries: Sequence[bytes], run: RunView) -> list[Bundle] | None:
    return plan_batch(parse_queue(entries), run.demand())


_GROUPS_AT_A_TIME = 8
_PIECE_BYTES = 256 * 1024
"""Bytes that are compressed before other requests get a turn: about a millisecond."""
_UNPACKED_INLINE = 1024 * 1024
"""Bytes of JSON that take a millisecond or two. Larger groups are unpacked in a thread;
decompression releases the interpreter lock."""
_LEVEL = 1
_GZIP_WINDOW_BITS = 31


async def batch_pieces(store: PayloadStore, due: DueBatch, head: bytes) -> AsyncIterator[bytes]:
    """Yield the JSON `{<head>"batch":[group, ...]}` in pieces, without parsing the groups.

    Raises:
        BatchGone: the batch was acknowledged, or the run was reset, while it was sent.
        StoreUnavailable
    """
    yield b"{" + head + b'"batch":['
    group_ids = due.lease.group_ids
    for start in range(0, len(group_ids), _GROUPS_AT_A_TIME):
        payloads = store.load(group_ids[start : start + _GROUPS_AT_A_TIME])
        is_first = start == 0
        async for payload in payloads:
            if payload is None:
                raise BatchGone(due.lease.batch_id)
            if not is_first:
                yield b","
            is_first = False
            async for piece in group_pieces(payload):
                yield piece
    yield b"]}"


async def group_pieces(payload: bytes) -> AsyncIterator[bytes]:
    """Yield the JSON of one stored group in pieces."""
    is_small = unpacked_bytes(payload) <= _UNPACKED_INLINE
    text = unpack(payload) if is_small else await run_in_threadpool(unpack, payload)
    for at in range(0, len(text), _PIECE_BYTES):
        yield text[at : at + _PIECE_BYTES]
        # a send returns without a pause while the socket accepts data, so give others a turn
        await asyncio.sleep(0)


def group_answer(payload: bytes, compressed: bool) -> Response:
    """One stored group as an answer. If it is small, the middleware compresses it."""
    if unpacked_bytes(payload) <= _PIECE_BYTES:
        return Response(unpack(payload), media_type="application/json")
    pieces = group_pieces(payload)
    if not compressed:
        return StreamingResponse(pieces, media_type="application/json")
    headers = {"content-encoding": "gzip", "vary": "Accept-Encoding"}
    return StreamingResponse(gzipped(pieces), media_type="application/json", headers=headers)


async def gzipped(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Compress the pieces as one gzip member."""
    compressor = isal_zlib.compressobj(_LEVEL, isal_zlib.DEFLATED, _GZIP_WINDOW_BITS)
    async for piece in pieces:
        if compressed := compressor.compress(piece):
            yield compressed
    yield compressor.flush()


async def begun(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Load the first group before the answer starts, so that a failure can set the status."""
    first = [await anext(pieces), await anext(pieces)]

    async def all_of_it() -> AsyncIterator[bytes]:
        for piece in first:
            yield piece
        async for piece in pieces:
            yield piece

    return all_of_it()
