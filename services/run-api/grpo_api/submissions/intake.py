"""Accepts submissions: queues whole groups directly, and buffers partial groups.

Submissions wait in line while the queue is full. A sender whose groups the next batch needs does
not wait: a queue that is full of other groups would never empty.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

import structlog

from grpo_api.errors import GroupRefused, QueueFull, ShuttingDown, StoreUnavailable
from grpo_api.lifetime import Lifetime, was_held
from grpo_api.planning.batch import Share, StoredGroup
from grpo_api.planning.placement import Arrival, place
from grpo_api.planning.run import Limits, RunView, may_overfill
from grpo_api.store import RunStore
from grpo_api.store.results import NotPlaced, Outcomes, Submission

_MAX_PLACEMENTS = 32
_CHECK_EVERY_S = 1.0
_STAGED_FROM_BYTES = 1024 * 1024
_UNLIMITED = Limits(queued_groups=2**53, queued_bytes=2**53)
_log = structlog.get_logger()


@dataclass(frozen=True)
class Patience:
    """How long submissions may wait, and how much memory they may hold.

    Attributes:
        placing_s: limit on waiting for earlier submissions that are being placed.
        full_s: limit on waiting while the queue is full.
        held_bytes: limit on the memory of all submissions that wait while the queue is full.
    """

    placing_s: float
    full_s: float
    held_bytes: int


class Intake:
    """Carries out `POST /scored_data` and `POST /scored_data_list`."""

    def __init__(
        self, store: RunStore, limits: Limits, patience: Patience, lifetime: Lifetime
    ) -> None:
        self._store = store
        self._limits = limits
        self._patience = patience
        self._turns = asyncio.Lock()
        self._view: RunView | None = None
        self._viewed_at = 0.0
        self._line = WaitingLine(lifetime, patience.held_bytes)

    async def submit(self, submission: Submission) -> Outcomes:
        """Accept all groups, or none of them.

        Returns:
            For each group, the sequences in its environment's buffer afterwards, or None if it was
            queued directly. A repeated submission gets the first answer again.
        Raises:
            GroupRefused: for the first group that cannot be accepted.
            Refused: 409, no trainer has registered, or the groups are of another run; 422, the key
                was used for other groups.
            QueueFull: the queue stayed full for as long as a submission may wait.
            StoreUnavailable: Redis is unreachable, or the run changes too fast.
        """
        if not submission.groups:
            return []
        outcome: Outcomes | NotPlaced = NotPlaced.FULL
        if self._line.is_empty:
            outcome = await self._take(submission, self._limits)
        if isinstance(outcome, NotPlaced):
            outcome = await self._wait_in_line(submission)
        return outcome

    async def _take(self, submission: Submission, limits: Limits) -> Outcomes | NotPlaced:
        """Accept the groups if there is room. `FULL` is the only `NotPlaced` that it returns."""
        if submission.stored_bytes <= _STAGED_FROM_BYTES:
            return await self._queue_or_place(submission, limits)
        # A large payload is staged in pieces first, because queueing it in one command would block
        # Redis. It is staged only if there is room.
        fill = (await self._store.environments.view()).counters.fill
        if fill.reaches(limits):
            return NotPlaced.FULL
        payloads = self._store.payloads
        async with payloads.staged([group.payload for group in submission.groups]) as names:
            staged = replace(submission, staged_prefix=payloads.staged_prefix, staged=names)
            return await self._queue_or_place(staged, limits)

    async def _queue_or_place(self, submission: Submission, limits: Limits) -> Outcomes | NotPlaced:
        outcome = await self._store.groups.queue_whole(submission, limits)
        if outcome is NotPlaced.PLAN:
            outcome = await self._place(submission, limits)
        if outcome is NotPlaced.MOVED:
            outcome = await self._place_in_turn(submission, limits)
        if outcome is NotPlaced.UNSTAGED:
            raise StoreUnavailable("storing the groups took too long; send the groups again")
        return outcome

    async def _place_in_turn(self, submission: Submission, limits: Limits) -> Outcomes | NotPlaced:
        """Place one submission at a time.

        Parts of one environment share its buffer. Of several that are placed at the same time, all
        but one must start over.
        """
        patience_s = self._patience.placing_s
        reason = (
            f"earlier groups were not added to the queue within {patience_s:g} s; send the "
            "new groups again"
        )
        async with in_turn(self._turns, patience_s, reason):
            for _ in range(_MAX_PLACEMENTS):
                outcome = await self._place(submission, limits)
                if outcome is not NotPlaced.MOVED:
                    return outcome
        raise StoreUnavailable(
            f"other submissions changed the partial groups {_MAX_PLACEMENTS} times while run-api "
            "stored this submission; send the same groups again"
        )

    async def _place(self, submission: Submission, limits: Limits) -> Outcomes | NotPlaced:
        """Plan and commit. `MOVED` if the run changed in between."""
        groups = submission.groups
        opened = await self._store.groups.open_intake(submission)
        under = submission.received_under or opened.served
        arrivals = [
            Arrival(group.env_id, StoredGroup(id_, group.sequences, len(group.payload), under))
            for id_, group in enumerate(groups, start=opened.first_id)
        ]
        try:
            placement = place(arrivals, opened.state)
        except GroupRefused as error:
            env_id = arrivals[error.index].env_id
            _log.warning("group.refused", env_id=env_id, index=error.index, reason=str(error))
            raise
        return await self._store.groups.commit(opened, placement, submission, limits)

    async def _wait_in_line(self, submission: Submission) -> Outcomes:
        # while it waits, the server may switch to a version that did not sample these groups
        served = await self._store.groups.served()
        submission = replace(submission, received_under=served)
        # Checked before joining the line: the answer must not depend on other submissions.
        if _is_waited_for(submission, await self._store.environments.view()):
            return await self._accept_over_limit(submission)
        began = asked = time.monotonic()
        with self._line.place(submission.stored_bytes) as ticket:
            while time.monotonic() - began <= self._patience.full_s:
                if ticket.is_first:
                    outcome = await self._take(submission, self._limits)
                    if not isinstance(outcome, NotPlaced):
                        return outcome
                await ticket.wait()
                if time.monotonic() - asked >= _CHECK_EVERY_S:
                    if _is_waited_for(submission, await self._recent_view()):
                        return await self._accept_over_limit(submission)
                    asked = time.monotonic()
        raise QueueFull(time.monotonic() - began)

    async def _recent_view(self) -> RunView:
        """A view shared by all waiting submissions, since each needs one every second."""
        if time.monotonic() - self._viewed_at >= _CHECK_EVERY_S or self._view is None:
            self._view = await self._store.environments.view()
            self._viewed_at = time.monotonic()
        return self._view

    async def _accept_over_limit(self, submission: Submission) -> Outcomes:
        outcome = await self._take(submission, _UNLIMITED)
        assert not isinstance(outcome, NotPlaced)
        return outcome


def _is_waited_for(submission: Submission, run: RunView) -> bool:
    """Whether the next batch may need a group of this submission."""
    shares: dict[int | None, Share] = {own.env_id: own.share for own in run.connected()}
    return any(
        may_overfill(shares.get(group.env_id, group.sequences), run) for group in submission.groups
    )


_FIRST_POLL_S = 0.05
_OTHERS_POLL_S = 0.5
MAX_WAITING = 256
"""Limit on waiting requests, because each one polls."""


class WaitingLine:
    """The line of waiting requests. `max_bytes`: limit on the memory of all of them together."""

    def __init__(self, lifetime: Lifetime, max_bytes: int) -> None:
        self._lifetime = lifetime
        self._max_bytes = max_bytes
        self._bytes = 0
        self._tickets: deque[Ticket] = deque()

    @property
    def is_empty(self) -> bool:
        return not self._tickets

    @contextmanager
    def place(self, size: int) -> Iterator[Ticket]:
        """A place at the end of the line, for a request of `size` bytes.

        Raises:
            QueueFull: the line has reached its limit in requests or in bytes.
        """
        if len(self._tickets) == MAX_WAITING or self._bytes + size > self._max_bytes:
            raise QueueFull(0.0)
        ticket = Ticket(self._tickets, self._lifetime)
        self._bytes += size
        self._tickets.append(ticket)
        try:
            yield ticket
        finally:
            self._bytes -= size
            self._tickets.remove(ticket)
            if self._tickets:
                self._tickets[0].called.set()


class Ticket:
    def __init__(self, line: deque[Ticket], lifetime: Lifetime) -> None:
        self._line = line
        self._lifetime = lifetime
        self.called = asyncio.Event()

    @property
    def is_first(self) -> bool:
        return self._line[0] is self

    async def wait(self) -> None:
        """Wait before the next attempt: briefly for the first in line, longer for the others.

        Raises:
            ShuttingDown
        """
        was_held.set(True)
        try:
            async with asyncio.timeout(_FIRST_POLL_S if self.is_first else _OTHERS_POLL_S):
                await self.called.wait()
        except TimeoutError:
            pass
        self.called.clear()
        if self._lifetime.closing.is_set():
            raise ShuttingDown


@asynccontextmanager
async def in_turn(turns: asyncio.Lock, patience_s: float, reason: str) -> AsyncIterator[None]:
    """Hold the lock during the block.

    Raises:
        StoreUnavailable: the lock was not free within `patience_s`; `reason` is the message.
    """
    try:
        async with asyncio.timeout(patience_s):
            await turns.acquire()
    except TimeoutError as error:
        raise StoreUnavailable(reason) from error
    try:
        yield
    finally:
        turns.release()
