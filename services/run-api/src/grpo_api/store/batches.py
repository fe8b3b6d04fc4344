"""Batches: polled for, planned from the queue, leased to the trainer."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_api.bundles import Bundle
from grpo_api.errors import TrainerNotRegistered
from grpo_api.records import LeasedBatch, LeaseLost, OpenPoll
from grpo_api.redis_link import RedisLink
from grpo_api.store.keys import keys, parse_bundle, write_bundle


class BatchStore:
    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def open_poll(self, poll: str) -> LeasedBatch | OpenPoll:
        """Hand out again the batch that nobody received, or acknowledge the one before.

        Raises:
            TrainerNotRegistered
        """
        outcome, *rest = await self._link.script(
            "open_poll", keys(self._link, "trainer", "lease", "payloads", "latest"), poll
        )
        if outcome == b"unregistered":
            raise TrainerNotRegistered
        if outcome == b"leased":
            return LeasedBatch(step=rest[0], sequences=rest[1], payloads=rest[2:], again=True)
        return OpenPoll(poll=poll, trainer_id=rest[0], batch_size=rest[1])

    async def candidates(self, batch_size: int) -> list[Bundle]:
        """The oldest bundles, as many of each kind as a batch could hold, oldest first."""
        entries = await self._link.script(
            "batch_candidates", keys(self._link, "queue", "queued_kinds"), batch_size
        )
        return sorted((parse_bundle(entry) for entry in entries), key=lambda bundle: bundle.id)

    async def lease(self, poll: OpenPoll, bundles: Sequence[Bundle]) -> LeasedBatch | LeaseLost:
        """Take the bundles off the queue as one batch and count the step, all or nothing."""
        outcome, *rest = await self._link.script(
            "lease",
            keys(
                self._link,
                *("trainer", "lease", "payloads", "queue", "queued_kinds", "queued_sizes"),
            ),
            poll.poll,
            poll.trainer_id,
            poll.batch_size,
            *(write_bundle(bundle) for bundle in bundles),
        )
        if outcome != b"leased":
            return LeaseLost(outcome.decode())
        return LeasedBatch(step=rest[0], sequences=rest[1], payloads=rest[2:], again=False)
