"""Accepts submissions, which wait in line while the queue is full.

A sender whose groups the next batch needs does not wait: a queue that is full of other groups would
never empty.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from grpo_api.errors import QueueFull, ShuttingDown
from grpo_api.planning.run_view import QueueLimits, RunView
from grpo_api.store.queue import Outcomes, Submission
from grpo_api.store.run import RunStore
from grpo_api.waiting import is_set_within

MAX_WAITING = 256
"""Limit on requests in line, because each one polls."""
_FIRST_POLL_S = 0.05
_OTHERS_POLL_S = 0.5
_CHECK_EVERY_S = 1.0
_UNLIMITED = QueueLimits(queued_groups=2**53, queued_bytes=2**53)


class Intake:
    """Carries out `POST /scored_data` and `POST /scored_data_list`.

    Args:
        full_s: limit on waiting while the queue is full.
        held_bytes: limit on the memory of all submissions that wait while the queue is full.
    """

    def __init__(
        self,
        store: RunStore,
        limits: QueueLimits,
        closing: asyncio.Event,
        *,
        full_s: float,
        held_bytes: int,
    ) -> None:
        self._store = store
        self._limits = limits
        self._closing = closing
        self._full_s = full_s
        self._view: RunView | None = None
        self._viewed_at = 0.0
        # One event for each waiting submission, set when it becomes the first.
        self._line: deque[asyncio.Event] = deque()
        self._room_bytes = held_bytes

    async def submit(
        self, submission: Submission, sender_left: Callable[[], Awaitable[bool]]
    ) -> Outcomes:
        """Accept all groups, or none of them. A repeated submission gets the first answer again.

        Args:
            sender_left: whether nobody waits for the answer any more

        Raises:
            QueueFull: the queue stayed full for as long as a submission may wait, or until its
                sender left, or the line has reached its limit in requests or in bytes.
            ShuttingDown: the server received a stop signal while the submission waited.
            GroupRefused, Refused, StoreUnavailable: as `GroupQueue.add`.
        """
        if not submission.groups:
            return []
        queue = self._store.queue
        if self._line:
            outcomes = await queue.earlier(submission)
        else:
            outcomes = await queue.add(submission, self._limits)
        if outcomes is not None:
            return outcomes
        # While it waits, the server may switch to a version that did not sample these groups.
        served = await queue.served()
        submission = replace(submission, received_under=served)
        # Checked before joining the line: the answer must not depend on other submissions.
        if _is_waited_for(submission, await self._store.view()):
            return await self._queue_over_limit(submission)
        return await self._queue_in_line(submission, sender_left)

    async def _queue_in_line(
        self, submission: Submission, sender_left: Callable[[], Awaitable[bool]]
    ) -> Outcomes:
        began = checked = time.monotonic()
        with self._place(submission.stored_bytes) as called:
            # An environment that was killed samples these items again once it is back.
            while time.monotonic() - began <= self._full_s and not await sender_left():
                if self._line[0] is called:
                    outcomes = await self._store.queue.add(submission, self._limits)
                    if outcomes is not None:
                        return outcomes
                await self._wait(called)
                if time.monotonic() - checked >= _CHECK_EVERY_S:
                    if _is_waited_for(submission, await self._recent_view()):
                        return await self._queue_over_limit(submission)
                    checked = time.monotonic()
        # The submission that this one repeats may have been ahead in the line.
        outcomes = await self._store.queue.earlier(submission)
        if outcomes is not None:
            return outcomes
        raise QueueFull(time.monotonic() - began)

    @contextmanager
    def _place(self, size: int) -> Iterator[asyncio.Event]:
        """A place at the end of the line, for a submission of `size` bytes."""
        if len(self._line) == MAX_WAITING or size > self._room_bytes:
            raise QueueFull(0.0)
        called = asyncio.Event()
        self._room_bytes -= size
        self._line.append(called)
        try:
            yield called
        finally:
            self._room_bytes += size
            self._line.remove(called)
            if self._line:
                self._line[0].set()

    async def _wait(self, called: asyncio.Event) -> None:
        """Wait before the next attempt: briefly for the first in line, longer for the others."""
        is_first = self._line[0] is called
        await is_set_within(_FIRST_POLL_S if is_first else _OTHERS_POLL_S, called)
        called.clear()
        if self._closing.is_set():
            raise ShuttingDown

    async def _queue_over_limit(self, submission: Submission) -> Outcomes:
        outcomes = await self._store.queue.add(submission, _UNLIMITED)
        assert outcomes is not None
        return outcomes

    async def _recent_view(self) -> RunView:
        """A view shared by all waiting submissions, since each needs one every second."""
        if time.monotonic() - self._viewed_at >= _CHECK_EVERY_S or self._view is None:
            self._view = await self._store.view()
            self._viewed_at = time.monotonic()
        return self._view


def _is_waited_for(submission: Submission, run: RunView) -> bool:
    """Whether the next batch may need a group of this submission."""
    return any(
        run.may_overfill(run.sender(group.env_id, group.sequences)) for group in submission.groups
    )
