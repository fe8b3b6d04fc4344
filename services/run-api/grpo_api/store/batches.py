"""Stores batches: leases them from the queue, tracks delivery, acknowledges them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from grpo_api.errors import (
    BatchesByLease,
    BatchGone,
    BatchUnknown,
    LeasesFull,
    TrainerNotRegistered,
    TrainerSuperseded,
)
from grpo_api.planning.batch import Bundle
from grpo_api.store.keys import parse_lease, write_queued
from grpo_api.store.redis import RedisLink
from grpo_api.store.results import Acknowledged, DueBatch, OpenPoll, PlanLost, Poll

_PLAIN = ""
"""Stands for the trainer id of a plain poll, which has none and cannot acknowledge."""


class BatchStore:
    def __init__(self, link: RedisLink, max_leased_bytes: int) -> None:
        self._link = link
        self._max_leased_bytes = max_leased_bytes

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[str]:
        """Name the answer to a plain poll while it is made and sent.

        No other plain poll gets the same batch until the block ends. The name is a Redis channel
        with one listener, this process; so the claim also ends if the process is killed.
        """
        answer = f"{self._link.prefix}answer:{os.urandom(16).hex()}"
        async with self._link.listening(answer):
            yield answer

    async def open_poll(self, poll: Poll) -> DueBatch | OpenPoll:
        """Return the next leased batch that the trainer lacks, or start to plan a new one.

        Raises:
            TrainerNotRegistered, TrainerSuperseded, BatchesByLease
            BatchUnknown: no batch has the id `poll.after`.
            LeasesFull: unacknowledged batches have reached their limit in bytes.
        """
        outcome, *rest = await self._link.script(
            "open_poll",
            ("trainer", "leases", "totals", "answers"),
            *_trainer_arguments(poll.trainer_id, poll.after),
            self._max_leased_bytes,
            "" if poll.batches_left is None else poll.batches_left,
            poll.answer,
        )
        _refuse(outcome, poll.after, rest)
        if outcome == b"full":
            raise LeasesFull(stored_bytes=rest[0], limit=self._max_leased_bytes)
        if outcome == b"leased":
            batch_id, lease = rest
            return DueBatch(poll.answer, parse_lease(batch_id, lease), again=True)
        return OpenPoll(poll.answer, *rest)

    async def candidates(self, batch_size: int) -> list[bytes]:
        """Entries of the oldest bundles, of each kind as many as a batch could hold.

        `parse_queue` reads them, which takes a while if there are many.
        """
        entries: list[bytes] = await self._link.script(
            "batch_candidates", ("queue", "queued_kinds"), batch_size
        )
        return entries

    async def lease(self, poll: OpenPoll, bundles: Sequence[Bundle]) -> DueBatch | PlanLost:
        """Move the bundles from the queue into one leased batch and count the step, atomically."""
        outcome, *rest = await self._link.script(
            "lease_batch",
            (
                *("trainer", "leases", "totals", "queue", "queued_kinds", "queued_sizes"),
                "answers",
            ),
            poll.answer,
            poll.trainer_id,
            poll.batch_id,
            poll.batch_size,
            *(write_queued(bundle) for bundle in bundles),
        )
        if outcome != b"leased":
            return PlanLost(outcome.decode())
        return DueBatch(poll.answer, parse_lease(poll.batch_id, rest[0]), again=False)

    async def acknowledge(self, trainer_id: int | None, batch_id: int = 0) -> Acknowledged:
        """Delete every batch up to `batch_id`; without `trainer_id`, every delivered batch.

        Raises:
            TrainerNotRegistered, TrainerSuperseded, BatchesByLease
            BatchUnknown: no batch has the id `batch_id`.
        """
        outcome, *rest = await self._link.script(
            "acknowledge",
            ("trainer", "leases", "totals", "payloads", "latest", "large", "answers"),
            *_trainer_arguments(trainer_id, batch_id),
        )
        _refuse(outcome, batch_id, rest)
        return Acknowledged(*rest)

    async def mark_delivered(self, due: DueBatch) -> None:
        """Record that a plain poll was answered in full; the next plain poll deletes the batch.

        Raises:
            BatchGone: another answer or another trainer has the batch now.
        """
        outcome = await self._link.script(
            "mark_delivered", ("answers",), due.lease.batch_id, due.answer
        )
        if outcome == b"gone":
            raise BatchGone(due.lease.batch_id)

    async def arrivals(self) -> int:
        """A number that grows with every submission."""
        (last_id,) = self._link.keys("last_group_id")
        return int(await self._link.call("GET", last_id) or 0)


def _trainer_arguments(trainer_id: int | None, batch_id: int) -> tuple[str, str]:
    """Trainer ids are stored as 32 hexadecimal digits: Lua's numbers do not hold 128 bits."""
    return (_PLAIN, "") if trainer_id is None else (f"{trainer_id:032x}", str(batch_id))


def _refuse(outcome: bytes, batch_id: int, rest: Sequence[int]) -> None:
    if outcome == b"unregistered":
        raise TrainerNotRegistered
    if outcome == b"superseded":
        raise TrainerSuperseded
    if outcome == b"by lease":
        raise BatchesByLease
    if outcome == b"unknown":
        raise BatchUnknown(batch_id, last=rest[0])
