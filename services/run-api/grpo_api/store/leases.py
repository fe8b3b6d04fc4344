"""Stores batches: leases them from the queue, tracks delivery, acknowledges them.

A trainer leases with its id and acknowledges. A *plain poll* has no id and cannot acknowledge.
While its answer is sent, it holds a *claim* on the batch, so that other plain polls get others.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from typing_extensions import TypedDict  # pydantic accepts `typing.TypedDict` from Python 3.12 on

from grpo_api.errors import BatchGone, BatchUnknown, Conflict, TrainerNotRegistered
from grpo_api.planning.placement import Groups
from grpo_api.store.keys import parse_groups
from grpo_api.store.redis import RedisLink

_PLAIN = ""
"""Stands for the trainer id of a plain poll."""


@dataclass(frozen=True)
class Lease:
    """A batch that was handed out and is not acknowledged yet.

    Lease(12, step=11, sequences=16, age_at_lease_s=1.5,
          groups=(StoredGroup(301, 8, 5120), StoredGroup(302, 8, 4870)), claim="", again=False)
    """

    batch_id: int
    step: int
    sequences: int
    age_at_lease_s: float
    """Time in the queue of its oldest group, when the batch was formed."""
    groups: Groups
    """In the order of the batch."""
    claim: str
    """Of the plain poll that it answers; "" if a trainer leased it by its id."""
    again: bool
    """An earlier poll formed the batch."""


@dataclass(frozen=True)
class Poll:
    """A trainer's request for a batch."""

    trainer_id: int | None = None
    """None for a plain poll."""
    after: int = 0
    """Id of the last batch that the trainer holds; ignored for a plain poll."""
    batches_left: int | None = None
    """Number of batches that the run needs after that; None if unknown."""
    claim: str = ""
    """Of a plain poll, from `Leases.claim`; "" otherwise."""


@dataclass(frozen=True)
class OpenPoll:
    """A poll that needs a new batch: the trainer, batch size and batch id to plan for."""

    claim: str
    trainer_id: bytes
    batch_size: int
    batch_id: int


class BatchesAcknowledged(TypedDict):
    """`acknowledged`: the last acknowledged batch. `released`: batches deleted by this call."""

    status: Literal["success"]
    acknowledged: int
    released: int


class PlanLost(Exception):
    """The queue has changed since the plan was made."""


class Leases:
    def __init__(self, link: RedisLink, max_leased_bytes: int) -> None:
        self._link = link
        self._max_leased_bytes = max_leased_bytes

    @asynccontextmanager
    async def claim(self) -> AsyncIterator[str]:
        """The claim of one plain poll, which lasts until its answer is sent.

        No other plain poll gets the same batch until the block ends. The claim is a Redis channel
        with one listener, this process; so it also ends if the process is killed.
        """
        claim = f"{self._link.prefix}answer:{os.urandom(16).hex()}"
        async with self._link.listening(claim):
            yield claim

    async def open_poll(self, poll: Poll) -> Lease | OpenPoll:
        """Return the next leased batch that the trainer lacks, or start to plan a new one.

        Raises:
            TrainerNotRegistered
            BatchUnknown: no batch has the id `poll.after`.
            Conflict: another trainer has registered, a trainer leases the batches of this run, or
                unacknowledged batches have reached their limit in bytes.
        """
        outcome, *rest = await self._link.script(
            "open_poll",
            *_trainer_arguments(poll.trainer_id, poll.after),
            self._max_leased_bytes,
            "" if poll.batches_left is None else poll.batches_left,
            poll.claim,
        )
        _refuse(outcome, poll.after, rest)
        if outcome == b"full":
            raise Conflict(
                "after",
                "leases_full",
                f"unacknowledged batches hold {rest[0]} bytes, and --max-leased-bytes is "
                f"{self._max_leased_bytes}; write a checkpoint and POST /batch/<id>/ack",
            )
        if outcome == b"leased":
            batch_id, lease = rest
            return _lease(batch_id, lease, poll.claim, again=True)
        return OpenPoll(poll.claim, *rest)

    async def candidates(self, batch_size: int) -> list[bytes]:
        """The oldest entries of the queue, of each kind as many as a batch could hold."""
        entries: list[bytes] = await self._link.script("batch_candidates", batch_size)
        return entries

    async def lease(self, poll: OpenPoll, entries: Sequence[bytes]) -> Lease | None:
        """Move entries from the queue into one leased batch and count the step, atomically.

        None if another trainer has registered, or the run was reset, since a plain poll began: the
        queue now belongs to that trainer.

        Raises:
            PlanLost: the queue changed, or belongs to another trainer than the one of the poll.
        """
        outcome, *rest = await self._link.script(
            "lease_batch", poll.claim, poll.trainer_id, poll.batch_id, poll.batch_size, *entries
        )
        if outcome == b"superseded" and poll.claim:  # a plain poll cannot say whose the queue is
            return None
        if outcome in (b"superseded", b"moved"):
            raise PlanLost
        return _lease(poll.batch_id, rest[0], poll.claim, again=False)

    async def acknowledge(self, trainer_id: int | None, batch_id: int = 0) -> BatchesAcknowledged:
        """Delete every batch up to `batch_id`; without `trainer_id`, every delivered batch.

        Raises:
            TrainerNotRegistered
            BatchUnknown: no batch has the id `batch_id`.
            Conflict: another trainer has registered, or a trainer leases the batches of this run.
        """
        given = _trainer_arguments(trainer_id, batch_id)
        outcome, *rest = await self._link.script("acknowledge", *given)
        _refuse(outcome, batch_id, rest)
        acknowledged, released = rest
        return {"status": "success", "acknowledged": acknowledged, "released": released}

    async def mark_delivered(self, lease: Lease) -> None:
        """Record that a plain poll was answered in full; the next plain poll deletes the batch.

        Raises:
            BatchGone: another plain poll or another trainer has the batch now.
        """
        outcome = await self._link.script("mark_delivered", lease.batch_id, lease.claim)
        if outcome == b"gone":
            raise BatchGone(lease.batch_id)

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
        raise Conflict(
            "trainer",
            "trainer_superseded",
            "another trainer has registered for this run and now receives its batches; stop one "
            "of the two trainers, or give each trainer its own run (--run-id of run-api)",
        )
    if outcome == b"by lease":
        raise Conflict(
            "trainer",
            "batches_by_lease",
            "a trainer leases the batches of this run, and GET /batch without ?trainer= would take "
            "a batch away from this trainer; POST /register first, or add "
            "?trainer=<uuid>&after=<batch id>",
        )
    if outcome == b"unknown":
        raise BatchUnknown(batch_id, last=rest[0])


def _lease(batch_id: int, written: bytes, claim: str, again: bool) -> Lease:
    step, sequences, leased_ms, oldest_ms, groups = written.decode().split()
    return Lease(
        batch_id=batch_id,
        step=int(step),
        sequences=int(sequences),
        age_at_lease_s=(int(leased_ms) - int(oldest_ms)) / 1000,
        groups=parse_groups(groups),
        claim=claim,
        again=again,
    )
