"""Closes the engine while its weights may be too old: it samples only while the supervisor says so.

The supervisor repeats that every second. If it was stopped, the engine holds requests until the
supervisor has looked for newer weights. While Redis does not answer, nobody knows of newer ones and
the engine samples; when Redis is back after a while, the engine holds requests likewise.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from grpo_core.weights.servers import ABSENT_AFTER_S
from grpo_vllm.http.middleware import GateRefusal

POLL_S = 0.05
_SILENT = "the supervisor of this engine has yet to say whether its weights are the newest"


class FollowGate:
    """Args: follows: False for servers that follow no trainer; their gate stays open"""

    def __init__(self, follows: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._follows = follows
        self._clock = clock
        self._heard_at = float("-inf")
        self._behind, self._hold = "", True
        self.head = self.staged = ""

    def note(self, behind: str, hold: bool, head: str, staged: str) -> None:
        """The supervisor's word. `behind`: why nothing may be sampled; "" if it may; `hold`: this
        may end soon. `head`, `staged`: ids of the newest announced version and of the newest one on
        this host."""
        self._heard_at = self._clock()
        self._behind, self._hold, self.head, self.staged = behind, hold, head, staged

    def refusal(self) -> GateRefusal | None:
        """The reason why requests may not pass now; None if they may."""
        if not self._follows:
            return None
        if self._clock() - self._heard_at > ABSENT_AFTER_S:
            return GateRefusal(_SILENT, hold=True)
        return GateRefusal(self._behind, self._hold) if self._behind else None

    async def wait(self, at_most_s: float) -> None:
        """Return soon, when the refusal may have changed."""
        await asyncio.sleep(min(at_most_s, POLL_S))
