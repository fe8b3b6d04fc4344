"""Commits weights: loads them into the running engine, or asks for an engine that starts with them.

A commit that fails half-way leaves the engine *torn*: it ends, and the next one starts on the new,
verified weights. If that fails too, an engine with the previous weights follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from grpo_core.weights.ref import WeightKind, WeightRef
from grpo_core.weights.servers import ServerState
from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.supervisor.engine import (
    LOAD_DEADLINE_S,
    EngineDoesNotAnswer,
    EngineRefused,
    EngineSlot,
)
from grpo_vllm.supervisor.follower import CommitRefused

log = structlog.get_logger()

RENAME_AGAIN_S = 1.0
TAKES_COMMITS = (ServerState.SERVING, ServerState.FAILED)


@dataclass(frozen=True)
class Restart:
    """A request for an engine with other weights. `served`: its result; `torn`: the running engine
    answers nothing, so it is not drained."""

    weights: WeightRef
    torn: bool
    served: asyncio.Future[None]


@dataclass
class SupervisorState:
    """`weights`: the weights of the running or starting engine; `previous`: the last weights that
    were served; `reason`: why nothing is served now.

    `news`: set at each change that others should know of.

    `restart`: the request that has no answer yet; `requested` is set while there is one.
    `launched`: the same request when an engine has been started for it.
    """

    weights: WeightRef = field(default_factory=WeightRef)
    previous: WeightRef = field(default_factory=WeightRef)
    reason: str = ""
    restart: Restart | None = None
    launched: Restart | None = None
    requested: asyncio.Event = field(default_factory=asyncio.Event)
    takes_commits: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    _phase: ServerState = ServerState.STARTING

    @property
    def phase(self) -> ServerState:
        return self._phase

    @phase.setter
    def phase(self, phase: ServerState) -> None:
        self._phase = phase
        self.news.set()
        if phase in TAKES_COMMITS:
            self.takes_commits.set()
        else:
            self.takes_commits.clear()

    @property
    def serving(self) -> bool:
        return self.phase is ServerState.SERVING

    def has_served(self, weights: WeightRef) -> None:
        """Record that an engine serves these weights. A later rollback returns to them."""
        self.previous = self.weights = weights
        self.news.set()

    def answer_restart(self, refused: str = "") -> None:
        """Answer the request that the engine was started for, if there is one."""
        launched = self.launched
        if launched is None:
            return
        self.launched = self.restart = None
        self.requested.clear()
        if launched.served.done():  # nobody waits any more
            return
        if refused:
            launched.served.set_exception(CommitRefused(refused))
        else:
            launched.served.set_result(None)


class EngineSeat:
    """Implements `Seat`. Args: save: records the served weights"""

    def __init__(
        self, state: SupervisorState, slot: EngineSlot, save: Callable[[], Awaitable[None]]
    ) -> None:
        self._state = state
        self._slot = slot
        self._save = save
        self._directories: list[str] = []
        self._loading = False
        self.torn = 0
        """Commits that failed half-way."""

    @property
    def loading(self) -> bool:
        """Whether the engine loads or renames weights."""
        return self._loading

    @loading.setter
    def loading(self, loading: bool) -> None:
        self._loading = loading
        self._state.news.set()

    @property
    def version(self) -> PolicyVersion:
        """As `Seat.version`."""
        return self._state.weights.version

    def in_use(self) -> frozenset[str]:
        """As `Seat.in_use`. A version's directory has its id as name."""
        paths = [self._state.weights.path, self._state.previous.path]
        names = {path.name for path in paths if path is not None}
        return frozenset(names | {Path(each).name for each in self._directories})

    def note_in_use(self, directories: list[str]) -> None:
        """Of adapters that requests in flight use."""
        self._directories = directories

    async def rename(self, version: PolicyVersion) -> None:
        """As `Seat.rename`. An engine that is busy is asked again: to do it twice does no harm."""
        clock = asyncio.get_running_loop().time
        began = clock()
        while True:
            await self._state.takes_commits.wait()
            weights = self._state.weights.model_copy(update={"version": version})
            engine, self.loading = self._slot.engine, True
            try:
                if engine is not None:
                    await engine.rename_weights(version)
                break
            except (EngineDoesNotAnswer, EngineRefused) as error:
                is_busy = isinstance(error, EngineDoesNotAnswer)
                if not is_busy or clock() - began > LOAD_DEADLINE_S:
                    await self._replace(weights, error)
                    return
                log.warning("engine.busy", reason=str(error))
                await asyncio.sleep(RENAME_AGAIN_S)
            finally:
                self.loading = False
        await self._served(weights)

    async def commit(self, weights: WeightRef, restarts: bool) -> float:
        """As `Seat.commit`."""
        await self._state.takes_commits.wait()
        engine = self._slot.engine
        if engine is not None and not (weights.trained or self._state.weights.trained):
            await self.rename(weights.version)  # the engine has the base model
            return 0.0
        if restarts or engine is None or weights.path is None:
            return await self._restart(weights)
        path, pause_s, self.loading = str(weights.path), 0.0, True
        try:
            if weights.kind is WeightKind.ADAPTER:
                self._directories = await engine.load_adapter(path, weights.version)
            else:
                pause_s = await engine.update_weights(path, weights.version)
        except EngineRefused as error:
            if weights.kind is WeightKind.ADAPTER:
                raise CommitRefused(str(error)) from error
            return await self._restart(weights)
        except EngineDoesNotAnswer as error:
            return await self._replace(weights, error)
        finally:
            self.loading = False
        await self._served(weights)
        return pause_s

    async def _served(self, weights: WeightRef) -> None:
        self._state.has_served(weights)
        await self._save()

    async def _replace(self, weights: WeightRef, error: Exception) -> float:
        """End a torn engine, and start one with the new weights."""
        self.torn, self.loading = self.torn + 1, False
        log.error("engine.torn", policy_version=tuple(weights.version), reason=str(error))
        return await self._restart(weights, torn=True)

    async def _restart(self, weights: WeightRef, torn: bool = False) -> float:
        loop = asyncio.get_running_loop()
        began, served = loop.time(), loop.create_future()
        self._state.restart = Restart(weights, torn, served)
        self._state.requested.set()
        await served
        return loop.time() - began
