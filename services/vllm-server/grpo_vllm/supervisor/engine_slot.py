"""Starts and ends one engine at a time, and waits until its predecessor's memory is free."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from typing import Any

import structlog

from grpo_core.deadline import Deadline
from grpo_core.process import end_orphans
from grpo_core.weights.ref import WeightRef
from grpo_vllm.forkserver.protocol import EnginePlan
from grpo_vllm.http.connection_handover import SupervisorEnd
from grpo_vllm.settings import ServerSettings
from grpo_vllm.supervisor.engine import Engine, EngineDoesNotAnswer, EngineRefused, ForkServer
from grpo_vllm.supervisor.host import Sockets

log = structlog.get_logger()

ANSWERING = ("serving", "paused")
"""States in which an engine answers requests. A pause lasts milliseconds."""
GPU_QUERY = ("--query-gpu=memory.used", "--format=csv,noheader,nounits")
QUERY_TIMEOUT_S = 10.0
DEADLINE_S = 60.0
SLACK_MIB = 512
"""Other processes on the GPU may use this much more memory without delaying the next engine."""
SETTLED_S = 3.0
"""Memory that is still in use after so long without a decrease belongs to other processes."""
_POLL_S = 0.5


class EngineSlot:
    """Holds the engine that is running, if there is one.

    Args:
        sockets: the listening sockets that every engine gets
        host: forks the engines
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
        self.channel = SupervisorEnd()
        self._memory_before_mib: list[int] = []
        self._dropped_before = self._tokens_before = 0
        self._tokens = 0
        self.engine: Engine | None = None
        self.answers = False
        """True if the engine answered requests at the last status query."""

    @property
    def dropped_requests(self) -> int:
        return self._dropped_before + self.channel.dropped

    @property
    def generation_tokens(self) -> int:
        return self._tokens_before + self._tokens

    async def measure_memory(self) -> None:
        """Measure the GPU memory in use before the first engine starts. Later engines wait until
        their predecessor has released its memory."""
        self._memory_before_mib = await asyncio.to_thread(gpu_memory_mib)

    async def launch(self, weights: WeightRef) -> Engine:
        theirs = self.channel.open()
        sockets, parked = self._sockets, tuple(self.channel.parked)
        plan = EnginePlan(
            channel=theirs.fileno(),
            public=sockets.public.fileno(),
            control=sockets.control.fileno() if sockets.control else None,
            private=sockets.private.fileno(),
            parked=parked,
            weights=weights,
        )
        engine = self.engine = await self._host.start_engine(plan, sockets.private_path)
        theirs.close()
        log.info(
            "engine.starting",
            policy_version=tuple(weights.version),
            weights=str(weights.path or self._settings.model),
            waiting_connections=len(parked),
        )
        return engine

    async def look(self) -> dict[str, Any] | None:
        """The engine's own status; None if no engine answers."""
        engine = self.engine
        if engine is None:
            return None
        try:
            seen = await engine.status()
        except (EngineDoesNotAnswer, EngineRefused) as error:
            self.answers = False
            log.debug("engine.unresponsive", reason=str(error))
            return None
        if engine is not self.engine:
            return None
        self.answers = seen["state"] in ANSWERING
        self._tokens = seen["generation_tokens"]
        return seen

    async def end(self) -> int:
        """End the engine and its processes, and wait until its memory is free. Returns its exit
        code."""
        assert self.engine is not None, "call launch() first"
        code = await self.engine.end(self._settings.stop_grace_s)
        self.channel.close()
        # vLLM's worker processes become our children when the engine ends.
        end_orphans(self._host.pids)
        self.engine, self.answers = None, False
        self._dropped_before += self.channel.dropped
        self._tokens_before += self._tokens
        self.channel.dropped = self._tokens = 0
        if not await memory_is_back(self._memory_before_mib):
            log.error(
                "gpu_memory.not_released",
                effect="the next engine starts anyway and may run out of memory",
            )
        return code


def gpu_memory_mib() -> list[int]:
    """Memory in use on each visible GPU, from `nvidia-smi`; [] if that is missing or fails."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    try:
        answer = subprocess.run(
            [command, *GPU_QUERY],
            capture_output=True,
            text=True,
            timeout=QUERY_TIMEOUT_S,
            check=True,
        )
        return [int(line) for line in answer.stdout.split()]
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        log.warning("gpu_memory.unknown", reason=f"nvidia-smi failed: {error}")
        return []


def _exceeds(used_mib: list[int], other_mib: list[int], by_mib: int = 0) -> bool:
    pairs = zip(used_mib, other_mib, strict=False)
    return any(used > other + by_mib for used, other in pairs)


async def memory_is_back(before_mib: list[int]) -> bool:
    """Wait until the GPU memory in use has fallen to `before_mib`, or has stopped falling. Returns
    False if it is still falling at the deadline.

    The driver frees a process's GPU memory some time after the process has ended. An engine that
    starts too early finds too little memory. Memory that other processes have taken meanwhile, for
    example a trainer, is not freed, so the wait ends when the memory in use stops falling.
    """
    if not before_mib:
        return True
    deadline, settled = Deadline(DEADLINE_S), Deadline(SETTLED_S)
    now = lowest = await asyncio.to_thread(gpu_memory_mib)
    while _exceeds(now, before_mib, by_mib=SLACK_MIB):
        if settled.has_passed:
            log.info(
                "gpu_memory.used_by_others", used_mib=now, used_before_last_engine_mib=before_mib
            )
            return True
        if deadline.has_passed:
            return False
        await asyncio.sleep(_POLL_S)
        now = await asyncio.to_thread(gpu_memory_mib)
        if _exceeds(lowest, now):
            lowest, settled = now, Deadline(SETTLED_S)
    return True
