"""Takes scored groups in: at once where they need no planning, else placed on metadata.

A full queue makes senders wait in line. Whoever the next batch waits for need not: a queue that is
full of everybody else's data would never drain.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

import structlog

from grpo_api.errors import GroupRefused, QueueFull, StoreUnavailable
from grpo_api.http.shutdown import Lifetime
from grpo_api.ingest.waiting_line import WaitingLine, in_turn
from grpo_api.planning.batch import StoredGroup
from grpo_api.planning.env_status import may_overfill
from grpo_api.planning.quotas import Share
from grpo_api.planning.run_view import Limits, RunView
from grpo_api.planning.submission import Arrival, place
from grpo_api.store import RunStore
from grpo_api.store.results import NotPlaced, Outcomes, Submission

_MAX_PLACEMENTS = 32
_ASK_EVERY_S = 1.0
_STAGED_FROM_BYTES = 1024 * 1024
_UNLIMITED = Limits(queued_groups=2**53, queued_bytes=2**53)
_log = structlog.get_logger()


@dataclass(frozen=True)
class Patience:
    """Attributes:
    placing_s: how long a submission waits for others that met the same trouble before it.
    full_s: how long it waits for a full queue.
    held_bytes: that submissions may hold while they wait for a full queue, all of them together.
    """

    placing_s: float
    full_s: float
    held_bytes: int


class Intake:
    """What `POST /scored_data` does."""

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
        """Take all groups, or none of them.

        Returns:
            For each group the sequences that its environment has buffered after it, or None where
            it was queued as it came. A submission that was taken before is answered as it was then.
        Raises:
            GroupRefused: the first group that cannot be taken.
            Refused: 409, no trainer has registered; 422, the receipt belongs to other groups.
            QueueFull: it stayed full for as long as a submission may wait.
            StoreUnavailable: Redis is away, or the run changes faster than it is read.
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
        """`FULL` is all that is left of why it may not be taken."""
        if submission.stored_bytes <= _STAGED_FROM_BYTES:
            return await self._queue_or_place(submission, limits)
        # What is large is stored ahead, so that queueing it keeps nobody else waiting; but not
        # before there is room for it.
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
            raise StoreUnavailable("storing the groups took too long; send them again")
        return outcome

    async def _place_in_turn(self, submission: Submission, limits: Limits) -> Outcomes | NotPlaced:
        """Parts of one environment meet in its buffer: sent side by side and placed side by side,
        all but one of them would start over each time."""
        patience_s = self._patience.placing_s
        reason = f"groups that arrived earlier were not placed within {patience_s:g} s"
        async with in_turn(self._turns, patience_s, reason):
            for _ in range(_MAX_PLACEMENTS):
                outcome = await self._place(submission, limits)
                if outcome is not NotPlaced.MOVED:
                    return outcome
        raise StoreUnavailable(
            f"the run changed {_MAX_PLACEMENTS} times while groups were placed; send them again"
        )

    async def _place(self, submission: Submission, limits: Limits) -> Outcomes | NotPlaced:
        """`MOVED` where the run changed between reading and committing."""
        groups = submission.groups
        opened = await self._store.groups.open_intake(submission.env_ids(), len(groups))
        under = submission.received_under or opened.served
        arrivals = [
            Arrival(group.env_id, StoredGroup(id_, group.sequences, len(group.payload), under))
            for id_, group in enumerate(groups, start=opened.first_id)
        ]
        try:
            placement = place(arrivals, opened.state)
        except GroupRefused as error:
            env_id = arrivals[error.index].env_id
            _log.warning("group refused", env_id=env_id, index=error.index, reason=str(error))
            raise
        return await self._store.groups.commit(opened, placement, submission, limits)

    async def _wait_in_line(self, submission: Submission) -> Outcomes:
        # while it waits the server may go on to versions that cannot have sampled it
        served = await self._store.groups.served()
        submission = replace(submission, received_under=served)
        # Asked before there is a place to wait in: it must not depend on who else waits.
        if _is_waited_for(submission, await self._store.environments.view()):
            return await self._let_in(submission)
        began = asked = time.monotonic()
        with self._line.place(submission.stored_bytes) as ticket:
            while time.monotonic() - began <= self._patience.full_s:
                if ticket.is_first:
                    outcome = await self._take(submission, self._limits)
                    if not isinstance(outcome, NotPlaced):
                        return outcome
                await ticket.wait()
                if time.monotonic() - asked >= _ASK_EVERY_S:
                    if _is_waited_for(submission, await self._recent_view()):
                        return await self._let_in(submission)
                    asked = time.monotonic()
        raise QueueFull(time.monotonic() - began)

    async def _recent_view(self) -> RunView:
        """One for all who wait: each of them asks every second."""
        if time.monotonic() - self._viewed_at >= _ASK_EVERY_S or self._view is None:
            self._view = await self._store.environments.view()
            self._viewed_at = time.monotonic()
        return self._view

    async def _let_in(self, submission: Submission) -> Outcomes:
        outcome = await self._take(submission, _UNLIMITED)
        assert not isinstance(outcome, NotPlaced)
        return outcome


def _is_waited_for(submission: Submission, run: RunView) -> bool:
    """Whether the next batch may need exactly this data."""
    shares: dict[int | None, Share] = {own.env_id: own.share for own in run.connected()}
    return any(
        may_overfill(shares.get(group.env_id, group.sequences), run) for group in submission.groups
    )
