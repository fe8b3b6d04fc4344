"""Room for one engine process, and what is counted over all that were in it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import structlog

from grpo_core.process.orphans import end_orphans
from grpo_vllm.forkserver.client import ForkServer
from grpo_vllm.forkserver.protocol import EnginePlan, PlannedWeights, SupervisorEnd, close_all
from grpo_vllm.settings import ServerSettings
from grpo_vllm.supervisor.engine_child import EngineChild, EngineDoesNotAnswer, EngineRefused
from grpo_vllm.supervisor.memory import GpuMemory, gpu_memory, memory_is_back
from grpo_vllm.supervisor.sockets import Sockets

log = structlog.get_logger()

ANSWERING = ("serving", "paused")
"""States of an engine process whose callers are answered; a pause lasts milliseconds."""


@dataclass
class _Totals:
    """Of engine processes that have ended."""

    dropped_requests: int = 0
    generation_tokens: int = 0


class EngineSlot:
    """Args:
    sockets: what engine processes get
    host: forks them
    """

    def __init__(
        self,
        settings: ServerSettings,
        sockets: Sockets,
        host: ForkServer,
    ) -> None:
        self._settings = settings
        self._sockets = sockets
        self._host = host
        self._channel = SupervisorEnd()
        self._memory_before = GpuMemory()
        self._totals = _Totals()
        self._tokens = 0
        self.engine: EngineChild | None = None
        self.answers = False
        """As of the last look."""

    @property
    def pid(self) -> int:
        """0 while there is none."""
        return self.engine.pid if self.engine else 0

    @property
    def dropped_requests(self) -> int:
        return self._totals.dropped_requests + self._channel.dropped

    @property
    def dropped_by_this_engine(self) -> int:
        return self._channel.dropped

    @property
    def generation_tokens(self) -> int:
        return self._totals.generation_tokens + self._tokens

    async def measure_memory(self) -> None:
        """Before the first engine: what must be free again after each."""
        self._memory_before = await asyncio.to_thread(gpu_memory)

    async def launch(self, weights: PlannedWeights) -> EngineChild:
        theirs = self._channel.open()
        sockets, parked = self._sockets, tuple(self._channel.parked)
        plan = EnginePlan(
            channel=theirs.fileno(),
            public=sockets.public.fileno(),
            control=sockets.control.fileno() if sockets.control else None,
            private=sockets.private.fileno(),
            parked=parked,
            weights=weights,
        )
        process = await self._host.start_engine(plan)
        theirs.close()
        engine = self.engine = EngineChild(process, self._channel, sockets.private_path)
        log.info(
            "starting the engine",
            policy_version=tuple(weights.version),
            weights=str(weights.directory or self._settings.model),
            waiting_connections=len(parked),
        )
        return engine

    async def serves(self) -> bool:
        """Returns once the engine process answers requests; always true."""
        return await self._channel.serving.wait()

    def take_parked(self) -> list[int]:
        """Connections that wait for an engine; the caller closes them."""
        return self._channel.take_parked()

    def let_go_of_parked(self) -> None:
        """The engine process has them now, or nobody will: ours were copies for the case that it
        does not start."""
        close_all(self._channel.take_parked())

    async def look(self) -> dict[str, Any] | None:
        """What the engine process says of itself; None where there is none that answers."""
        engine = self.engine
        if engine is None:
            return None
        try:
            seen = await engine.status()
        except (EngineDoesNotAnswer, EngineRefused) as error:
            self.answers = False
            log.debug("the engine process does not answer", reason=str(error))
            return None
        if engine is not self.engine:
            return None
        self.answers = seen["state"] in ANSWERING
        self._tokens = seen["generation_tokens"]
        return seen

    async def end(self) -> int:
        """Its exit code, once it and all that it started are gone and its memory is free."""
        assert self.engine is not None, "launch() comes first"
        code = await self.engine.end(self._settings.stop_grace_s)
        # vLLM's worker processes become ours when their parent goes.
        end_orphans(self._host.pids)
        self.engine, self.answers = None, False
        self._totals.dropped_requests += self._channel.dropped
        self._totals.generation_tokens += self._tokens
        self._channel.dropped = self._tokens = 0
        if not await memory_is_back(self._memory_before):
            log.error(
                "GPU memory of the engine that ended is still in use; starting another anyway"
            )
        return code
