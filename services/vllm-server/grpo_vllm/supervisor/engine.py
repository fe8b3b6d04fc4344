"""Starts, queries and ends one engine at a time, over its private socket and by signals."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import Any

import httpx
import structlog

from grpo_core.errors import GrpoError
from grpo_core.process.orphans import end_orphans
from grpo_core.weights.ref import WeightRef
from grpo_vllm.forkserver.client import ForkedEngine, ForkServer
from grpo_vllm.forkserver.protocol import EnginePlan, SupervisorEnd
from grpo_vllm.settings import ServerSettings
from grpo_vllm.supervisor.preflight import gpu_memory_mib, memory_is_back
from grpo_vllm.supervisor.sockets import Sockets

log = structlog.get_logger()

ANSWERING = ("serving", "paused")
"""States in which an engine answers requests. A pause lasts milliseconds."""
ASK_DEADLINE_S = 5.0
LOAD_DEADLINE_S = 150.0


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
        self.engine: EngineProcess | None = None
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

    async def launch(self, weights: WeightRef) -> EngineProcess:
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
        process = await self._host.start_engine(plan)
        theirs.close()
        engine = self.engine = EngineProcess(process, self.channel, sockets.private_path)
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


class EngineDoesNotAnswer(GrpoError):
    """The engine did not answer a request in time: it is busy, hangs or has ended."""


class EngineRefused(GrpoError):
    """The engine answered a request with status 4xx, because it cannot carry out the request."""


class EngineProcess:
    """One engine, from its start to its end. Needs a running event loop.

    Args:
        process: the engine that the fork server started
        channel: receives the engine's messages
        private_path: the unix socket on which the engine answers the supervisor
    """

    def __init__(self, process: ForkedEngine, channel: SupervisorEnd, private_path: Path) -> None:
        self._process = process
        self._channel = channel
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(private_path)),
            base_url="http://engine",
            timeout=ASK_DEADLINE_S,
        )
        self.ended = process.ended

    @property
    def pid(self) -> int:
        """The process id; 0 until the process exists."""
        return self._process.pid

    async def status(self) -> dict[str, Any]:
        """`GET /engine/status`. Raises `EngineDoesNotAnswer`."""
        answer: dict[str, Any] = await self._ask("GET", "/engine/status", ASK_DEADLINE_S)
        return answer

    async def load_adapter(self, directory: Path, version: tuple[int, int]) -> list[str]:
        """Serve the adapter. Returns the adapter directories that the engine may still read.

        Raises:
            EngineRefused: the engine refused the adapter and still serves the previous weights.
            EngineDoesNotAnswer: the served weights are unknown.
        """
        body = {"adapter_path": str(directory), "policy_version": list(version)}
        answer = await self._ask("POST", "/lora/load", LOAD_DEADLINE_S, json=body)
        return [str(path) for path in answer["in_use"]]

    async def drain(self, within_s: float) -> None:
        """Tell the engine to drain and end. Returns at once; never raises."""
        with contextlib.suppress(EngineDoesNotAnswer, EngineRefused):
            await self._ask("POST", "/engine/drain", ASK_DEADLINE_S, json={"within_s": within_s})

    async def ended_within(self, seconds: float) -> bool:
        await asyncio.wait([self.ended], timeout=seconds)
        return self.ended.done()

    async def end(self, grace_s: float) -> int:
        """Send SIGTERM and, after `grace_s` seconds, SIGKILL. Returns the exit code."""
        if not self.ended.done():
            self._process.send(signal.SIGTERM)
        if not await self.ended_within(grace_s):
            log.warning(
                "engine.killed",
                pid=self.pid,
                reason=f"the engine did not end within {grace_s:g} s of SIGTERM",
            )
            self._process.send(signal.SIGKILL)
        code = await self.ended
        self._process.close()
        await self._http.aclose()
        self._channel.close()
        return code

    async def _ask(self, method: str, path: str, deadline_s: float, **request: Any) -> Any:
        try:
            async with asyncio.timeout(deadline_s):
                response = await self._http.request(method, path, timeout=deadline_s, **request)
        except (httpx.TransportError, TimeoutError) as error:
            raise EngineDoesNotAnswer(
                f"engine {self.pid} did not answer {method} {path} within {deadline_s:g} s "
                f"({str(error) or type(error).__name__})"
            ) from error
        if response.is_client_error:
            raise EngineRefused(_detail(response))
        if not response.is_success:
            raise EngineDoesNotAnswer(
                f"engine {self.pid} answered {method} {path} with status {response.status_code}: "
                f"{response.text}"
            )
        return response.json()


def _detail(response: httpx.Response) -> str:
    """The reason in the answer. Our routes send `{"detail": ...}`, the HTTP server plain text."""
    try:
        return str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return response.text
