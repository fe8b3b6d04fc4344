"""Hands batches to the trainer: plan on metadata, commit in Redis, plan again if it moved.

Every poll carries an id of its own. A batch remembers the poll that it was handed to, and a poll
with another id acknowledges it.
"""

from __future__ import annotations

import uuid

import structlog

from grpo_api.batching import plan_batch
from grpo_api.errors import StoreUnavailable
from grpo_api.records import LeasedBatch, LeaseLost, OpenPoll
from grpo_api.store import RunStore

_MAX_PLANS = 8
_log = structlog.get_logger()


class BatchDispatcher:
    """What `GET /batch` does."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._unanswered_poll: str | None = None

    async def next_batch(self) -> LeasedBatch | None:
        """Acknowledge the batch handed out before and lease the next one.

        None where no batch is complete; that answer acknowledges too, since a trainer polls
        again only once it has received the batch before.

        Raises:
            TrainerNotRegistered
            StoreUnavailable: a batch that the failed poll may have leased is kept for the next.
        """
        poll = self._unanswered_poll or uuid.uuid4().hex
        self._unanswered_poll = None
        try:
            batch = await self._deliver(poll)
        except StoreUnavailable:
            # Redis may have leased a batch to this poll before the answer was lost. The trainer
            # never saw it, so its next poll goes by the same id instead of acknowledging it.
            self._unanswered_poll = poll
            raise
        if batch is not None:
            _log.info(
                "batch delivered",
                step=batch.step,
                groups=len(batch.payloads),
                sequences=batch.sequences,
                again=batch.again,
            )
        return batch

    async def _deliver(self, poll: str) -> LeasedBatch | None:
        opened = await self._store.batches.open_poll(poll)
        if isinstance(opened, LeasedBatch):
            return opened
        for _ in range(_MAX_PLANS):
            outcome = await self._plan_and_lease(opened)
            if outcome is not LeaseLost.MOVED:
                return outcome if isinstance(outcome, LeasedBatch) else None
        return None

    async def _plan_and_lease(self, opened: OpenPoll) -> LeasedBatch | LeaseLost | None:
        run = await self._store.environments.view()
        queue = await self._store.batches.candidates(opened.batch_size)
        bundles = plan_batch(queue, run.demand())
        return None if bundles is None else await self._store.batches.lease(opened, bundles)
