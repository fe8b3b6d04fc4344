"""Requests to serve other weights: the follower makes them, and the supervisor carries them out one
after another. Here too is what an engine serves in between."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from grpo_core.errors import GrpoError
from grpo_core.weights.ref import WeightRef
from grpo_core.wire.policy_version import PolicyVersion


class CommitRefused(GrpoError):
    """The engine does not take these weights; it serves the previous ones again."""


@dataclass(eq=False)
class Commit:
    """A request.

    `restarts`: a new engine must load the weights; `renames`: only their version is new; `torn`: it
    failed half-way, so the engine answers nothing and is not drained; `was_killed`: a signal has
    ended an engine that started with the weights; `began`: when the supervisor took it; `served`:
    its result, the seconds of the pause.
    """

    weights: WeightRef
    restarts: bool = False
    renames: bool = False
    torn: bool = False
    was_killed: bool = False
    began: float = 0.0
    served: asyncio.Future[float] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class CommitQueue:
    """`weights`: of the running or starting engine, also if an operator changed them; `previous`:
    the last ones that were served; `adapters`: directories that requests in flight use."""

    def __init__(self) -> None:
        self.weights = self.previous = WeightRef()
        self.adapters: list[str] = []
        self.requests: asyncio.Queue[Commit] = asyncio.Queue()

    @property
    def version(self) -> PolicyVersion:
        return self.weights.version

    def in_use(self) -> frozenset[str]:
        """Ids of the versions whose directories the engine may still read."""
        paths = [path for path in (self.weights.path, self.previous.path) if path is not None]
        return frozenset(path.name for path in [*paths, *map(Path, self.adapters)])

    async def rename(self, version: PolicyVersion) -> None:
        """Give the served weights another version. Raises `CommitRefused`."""
        await self._carried_out(Commit(WeightRef(version=version), renames=True))

    async def commit(self, weights: WeightRef, restarts: bool) -> float:
        """Serve the weights: every request from now on is answered by them. Returns the seconds of
        the pause. Raises `CommitRefused`."""
        return await self._carried_out(Commit(weights, restarts))

    async def _carried_out(self, commit: Commit) -> float:
        self.requests.put_nowait(commit)
        return await commit.served
