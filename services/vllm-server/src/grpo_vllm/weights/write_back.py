"""The wait of a restarted engine for the weights that the run was served before.

The engine that starts holds the checkpoint's weights, which are older than what the run has seen.
Requests are held until a trainer has written everything; after a deadline they are refused at once,
and still a trainer may come.
"""

from __future__ import annotations

import asyncio

import structlog

from grpo_core.wire import PolicyVersion

log = structlog.get_logger()


class WriteBack:
    """Nothing is missing until `begin`. Lives on the running event loop."""

    def __init__(self) -> None:
        self.missing = False
        self.overdue = False
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, version: PolicyVersion, deadline_s: float) -> None:
        """The weights of `version` are missing; a trainer has `deadline_s` seconds."""
        self.missing = True
        self._timer = asyncio.get_running_loop().call_later(deadline_s, self._give_up, deadline_s)
        log.warning(
            "this run was served other weights than the checkpoint's; waiting for a trainer to "
            "write them back",
            policy_version=tuple(version),
            deadline_s=deadline_s,
        )

    def done(self) -> None:
        """A trainer has written everything."""
        if not self.missing:
            return
        log.info("the weights are back; serving", after_deadline=self.overdue)
        self.missing = self.overdue = False
        if self._timer is not None:
            self._timer.cancel()
        self._changed.set()

    async def wait(self, at_most_s: float) -> None:
        """Until the weights are back or overdue, and no longer than `at_most_s` seconds."""
        try:
            async with asyncio.timeout(at_most_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def _give_up(self, deadline_s: float) -> None:
        self.overdue = True
        self._changed.set()
        log.error(
            "no trainer has written the weights back; requests are refused",
            deadline_s=deadline_s,
            next="start the trainer again, or this server with another --run-id or with "
            "--no-await-weights to serve the checkpoint",
        )
