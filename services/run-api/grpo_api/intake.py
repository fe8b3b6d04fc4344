"""Accepts submissions, which wait in line while the queue is full.

A sender whose groups the next batch needs does not wait: a queue that is full of other groups would
never empty.
"""

from __future__ import annotations

import time
from dataclasses import replace

from grpo_api.errors import QueueFull
from grpo_api.planning.run_view import Limits, RunView
from grpo_api.store import RunStore
from grpo_api.store.queue import Outcomes, Submission
from grpo_api.waiting import Lifetime, WaitingLine

_CHECK_EVERY_S = 1.0
_UNLIMITED = Limits(queued_groups=2**53, queued_bytes=2**53)


class Intake:
    """Carries out `POST /scored_data` and `POST /scored_data_list`.

    Args:
        full_s: limit on waiting while the queue is full.
        held_bytes: limit on the memory of all submissions that wait while the queue is full.
    """

    def __init__(
        self, store: RunStore, limits: Limits, lifetime: Lifetime, *, full_s: float, held_bytes: int
    ) -> None:
        self._store = store
        self._limits = limits
        self._full_s = full_s
        self._view: RunView | None = None
        self._viewed_at = 0.0
        self._line = WaitingLine(lifetime, held_bytes)

    async def submit(self, submission: Submission) -> Outcomes:
        """Accept all groups, or none of them. A repeated submission gets the first answer again.

        Raises:
            QueueFull: the queue stayed full for as long as a submission may wait.
            GroupRefused, Refused, StoreUnavailable: as `GroupStore.queue`.
        """
        if not submission.groups:
            return []
        if not self._line:
            outcomes = await self._store.groups.queue(submission, self._limits)
            if outcomes is not None:
                return outcomes
        # while it waits, the server may switch to a version that did not sample these groups
        served = await self._store.groups.served()
        submission = replace(submission, received_under=served)
        # Checked before joining the line: the answer must not depend on other submissions.
        if self._is_waited_for(submission, await self._store.registrations.view()):
            return await self._queue_over_limit(submission)
        return await self._queue_in_line(submission)

    async def _queue_in_line(self, submission: Submission) -> Outcomes:
        began = checked = time.monotonic()
        with self._line.place(submission.stored_bytes) as ticket:
            while time.monotonic() - began <= self._full_s:
                if ticket.is_first:
                    outcomes = await self._store.groups.queue(submission, self._limits)
                    if outcomes is not None:
                        return outcomes
                await ticket.wait()
                if time.monotonic() - checked >= _CHECK_EVERY_S:
                    if self._is_waited_for(submission, await self._recent_view()):
                        return await self._queue_over_limit(submission)
                    checked = time.monotonic()
        raise QueueFull(time.monotonic() - began)

    async def _queue_over_limit(self, submission: Submission) -> Outcomes:
        outcomes = await self._store.groups.queue(submission, _UNLIMITED)
        assert outcomes is not None
        return outcomes

    async def _recent_view(self) -> RunView:
        """A view shared by all waiting submissions, since each needs one every second."""
        if time.monotonic() - self._viewed_at >= _CHECK_EVERY_S or self._view is None:
            self._view = await self._store.registrations.view()
            self._viewed_at = time.monotonic()
        return self._view

    @staticmethod
    def _is_waited_for(submission: Submission, run: RunView) -> bool:
        """Whether the next batch may need a group of this submission."""
        return any(
            run.may_overfill(run.sender(group.env_id, group.sequences))
            for group in submission.groups
        )
