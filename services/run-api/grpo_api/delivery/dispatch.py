"""Registers trainers and hands out batches to them.

Both plan from metadata, then commit in Redis. If the run changed in between, they plan again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import structlog
from starlette.concurrency import run_in_threadpool

from grpo_api.errors import Refused, StoreUnavailable
from grpo_api.http.shutdown import Lifetime
from grpo_api.planning.batch import Bundle, plan_batch
from grpo_api.planning.quotas import batch_size_conflicts
from grpo_api.planning.run_view import RunView
from grpo_api.store import RunStore
from grpo_api.store.keys import parse_queue
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
