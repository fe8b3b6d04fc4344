"""Batches: polled for, planned from the queue, leased to the trainer, acknowledged."""

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
"""In place of a trainer id: the poll of a trainer that cannot acknowledge."""


class BatchStore:
    def __init__(self, link: RedisLink, max_leased_bytes: int) -> None:
        self._link = link
        self._max_leased_bytes = max_leased_bytes

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[str]:
        """The name of an answer to a plain poll, while it is made and sent.

        The batch that is handed out under it goes to no other plain poll until this ends. It ends
        too where the process is killed: Redis counts who listens to the channel of that name.
        """
        answer = f"{self._link.prefix}answer:{os.urandom(16).hex()}"
        async with self._link.listening(answer):
            yield answer

    async def open_poll(self, poll: Poll) -> DueBatch | OpenPoll:
        """Hand out again what the trainer does not hold, or begin to plan the next batch.

        Raises:
            TrainerNotRegistered, TrainerSuperseded, BatchesByLease
            BatchUnknown: no batch has the id `poll.after`.
            LeasesFull: nothing new is handed out before batches are acknowledged.
        """
        outcome, *rest = await self._link.script(
            "open_poll",
            ("trainer", "leases", "totals", "answers"),
            *_asking(poll.trainer_id, poll.after),
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
        """Entries of the oldest bundles, as many of each kind as a batch could hold; for
        `parse_queue`, which takes a while where they are many."""
        entries: list[bytes] = await self._link.script(
            "batch_candidates", ("queue", "queued_kinds"), batch_size
        )
        return entries

    async def lease(self, poll: OpenPoll, bundles: Sequence[Bundle]) -> DueBatch | PlanLost:
        """Take the bundles off the queue as one batch and count the step, all or nothing."""
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
        """Let go of every batch up to `batch_id`, or of what was delivered without `trainer_id`.

        Raises:
            TrainerNotRegistered, TrainerSuperseded, BatchesByLease
            BatchUnknown: no batch has the id `batch_id`.
        """
        outcome, *rest = await self._link.script(
            "acknowledge",
            ("trainer", "leases", "totals", "payloads", "latest", "large", "answers"),
            *_asking(trainer_id, batch_id),
        )
        _refuse(outcome, batch_id, rest)
        return Acknowledged(*rest)

    async def mark_delivered(self, due: DueBatch) -> None:
        """A trainer that cannot acknowledge was sent all of it: its next poll lets go of it.

        Raises:
            BatchGone: it is another answer's, since Redis lost sight of this one, or another
                trainer's.
        """
        outcome = await self._link.script(
            "mark_delivered", ("answers",), due.lease.batch_id, due.answer
        )
        if outcome == b"gone":
            raise BatchGone(due.lease.batch_id)

    async def arrivals(self) -> int:
        """A number that grows with every submission: where it stands still, nothing came."""
        (last_id,) = self._link.keys("last_group_id")
        return int(await self._link.call("GET", last_id) or 0)


def _asking(trainer_id: int | None, batch_id: int) -> tuple[str, str]:
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
