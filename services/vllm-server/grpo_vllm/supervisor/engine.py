"""Starts and ends one engine at a time: the fork server, the engine's private socket, its slot."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import structlog

from grpo_core.clients.service import reason_and_kinds
from grpo_core.deadline import Deadline
from grpo_core.errors import GrpoError
from grpo_core.process import children, end_orphans, killed_with_parent
from grpo_core.tree.server import ServerSettings
from grpo_core.weights.ref import WeightRef
from grpo_core.weights.servers import EngineState
from grpo_vllm.engine_protocol import EnginePlan, SupervisorEnd, receive_fact, send_plan
from grpo_vllm.supervisor.host import Sockets, gpu_memory_mib, memory_is_back

log = structlog.get_logger()

ENGINE_MODULE = "grpo_vllm.engine.process"
SEND_DEADLINE_S = 30.0
END_DEADLINE_S = 10.0
ASK_DEADLINE_S = 5.0
LOAD_DEADLINE_S = 150.0
ORPHANS_DEADLINE_S = 1.0
_POLL_S = 0.01
_LONGEST_PATH = 107 - len("/") - 36
"""Of a directory in which vLLM makes Unix sockets with the name of a UUID."""
ANSWERING = (EngineState.SERVING, EngineState.PAUSED)
"""States in which an engine answers requests. A pause lasts milliseconds."""


class ForkServer:
    """Starts the fork server's process with the first engine, and again if the process has died.
    Needs a running event loop.

    Args:
        module: the module that the fork server imports; see `grpo_vllm.forkserver`
        options: the command line of the engines
        sockets: directory for those of vLLM's processes, which leave them if they are killed
    """

    def __init__(self, module: str, options: Sequence[str], sockets: Path) -> None:
        self._arguments = [module, *options]
        self._environment = dict(os.environ)
        if len(os.fsencode(sockets)) <= _LONGEST_PATH:
            self._environment.setdefault("VLLM_RPC_BASE_PATH", str(sockets))
        self._process: asyncio.subprocess.Process | None = None
        self._socket: socket.socket | None = None

    @property
    def pids(self) -> frozenset[int]:
        """The fork server's process id; empty if it is not running."""
        running = self._process is not None and self._process.returncode is None
        return frozenset({self._process.pid} if self._process and running else ())

    async def start_engine(self, plan: EnginePlan, private_path: Path) -> Engine:
        """Returns at once. The first engine starts when the fork server has finished importing."""
        if not self.pids:
            await self._start()
        assert self._process is not None
        assert self._socket is not None
        engine = Engine(self._process, self._socket, private_path)
        with contextlib.closing(self._socket.dup()) as sending:
            sending.settimeout(SEND_DEADLINE_S)
            try:
                await asyncio.to_thread(send_plan, sending, plan)
            except OSError as error:
                log.error(
                    "fork_server.killed",
                    reason=f"the fork server did not receive the engine's settings: {error}",
                )
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
        return engine

    async def close(self) -> None:
        """Call this when no engine is running."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is None:
            return
        try:
            await asyncio.wait_for(self._process.wait(), END_DEADLINE_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _start(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "grpo_vllm.forkserver"),
                *(str(theirs.fileno()), *self._arguments),
                stdin=asyncio.subprocess.DEVNULL,
                env=self._environment,
                pass_fds=[theirs.fileno()],
                preexec_fn=killed_with_parent,
            )


class EngineDoesNotAnswer(GrpoError):
    """The engine did not answer a request in time: it is busy, hangs or has ended."""


class EngineRefused(GrpoError):
    """The engine answered a request with status 4xx, because it cannot carry out the request."""


class Engine:
    """One engine, from its start to its end. Needs a running event loop.

    Args:
        server: the fork server's process
        facts: the socket on which the fork server reports this engine's start and end
        private_path: the unix socket on which the engine answers the supervisor
    """

    def __init__(
        self, server: asyncio.subprocess.Process, facts: socket.socket, private_path: Path
    ) -> None:
        self.pid = 0
        """The process id; 0 until the fork server has forked the engine."""
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = loop.create_future()
        """The engine's exit code. A negative code is the signal that ended it."""
        self._server = server
        self._pidfd: int | None = None
        self._descriptor = facts.fileno()
        self._facts = facts
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(private_path)),
            base_url="http://engine",
            timeout=ASK_DEADLINE_S,
        )
        loop.add_reader(self._descriptor, self._read)
        self._is_killed = False
        self._watching = asyncio.create_task(self._watch_server())

    async def status(self, **word: str | bool) -> dict[str, Any]:
        """`POST /engine/status` with the supervisor's word. Raises `EngineDoesNotAnswer`."""
        return await self._ask("/engine/status", word)

    async def load(self, weights: WeightRef) -> tuple[float, list[str]]:
        """Serve a whole model or an adapter. Returns the seconds of the pause, and the adapter
        directories that the engine may still read.

        Raises:
            EngineRefused: the engine cannot load it and still serves the previous weights.
            EngineDoesNotAnswer: the engine may hold a part of the new weights.
        """
        body = {"directory": str(weights.path), "policy_version": list(weights.version)}
        answer = await self._ask("/engine/weights", body, LOAD_DEADLINE_S)
        return float(answer["pause_s"]), [str(path) for path in answer["in_use"]]

    async def rename_weights(self, version: tuple[int, int]) -> None:
        """Raises `EngineDoesNotAnswer`, `EngineRefused`."""
        await self._ask("/engine/version", {"policy_version": list(version)})

    async def drain(self, within_s: float) -> None:
        """Tell the engine to drain and end. Returns at once; never raises."""
        with contextlib.suppress(EngineDoesNotAnswer, EngineRefused):
            await self._ask("/engine/drain", {"within_s": within_s})

    async def ended_within(self, seconds: float) -> bool:
        await asyncio.wait([self.ended], timeout=seconds)
        return self.ended.done()

    async def end(self, grace_s: float) -> int:
        """Send SIGTERM and, after `grace_s` seconds, SIGKILL. Returns the exit code."""
        if not self.ended.done():
            self._send(signal.SIGTERM)
        if not await self.ended_within(grace_s):
            log.warning(
                "engine.killed",
                pid=self.pid,
                reason=f"the engine did not end within {grace_s:g} s of SIGTERM",
            )
            self._send(signal.SIGKILL)
        code = await self.ended
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        await self._http.aclose()
        return code

    def _send(self, number: signal.Signals) -> None:
        """Send the engine a signal. If it does not exist yet, kill the fork server instead."""
        with contextlib.suppress(ProcessLookupError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, number)
            elif not self.ended.done():
                self._is_killed = True
                self._server.kill()

    def _read(self) -> None:
        try:
            fact = receive_fact(self._facts)
        except BlockingIOError:
            return
        match fact:
            case None:  # the fork server ended; `_watch_server` gets its exit code
                asyncio.get_running_loop().remove_reader(self._descriptor)
            case (exit_code, None):
                self._watching.cancel()
                self._end(exit_code)
            case (pid, pidfd):
                self.pid, self._pidfd = pid, pidfd
                log.info("engine.forked", pid=pid)

    async def _watch_server(self) -> None:
        # The kernel kills the engine together with the fork server.
        code = await self._server.wait()
        if not self._is_killed:
            log.error("fork_server.ended", status=code)
        self._end(code or 1)

    def _end(self, code: int) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        if not self.ended.done():
            self.ended.set_result(code)

    async def _ask(
        self, path: str, body: Mapping[str, Any], deadline_s: float = ASK_DEADLINE_S
    ) -> dict[str, Any]:
        try:
            async with asyncio.timeout(deadline_s):
                response = await self._http.post(path, json=body, timeout=deadline_s)
        except (httpx.TransportError, TimeoutError) as error:
            raise EngineDoesNotAnswer(
                f"engine {self.pid} did not answer POST {path} within {deadline_s:g} s "
                f"({str(error) or type(error).__name__})"
            ) from error
        if response.is_client_error:
            raise EngineRefused(reason_and_kinds(response)[0])
        if not response.is_success:
            raise EngineDoesNotAnswer(
                f"engine {self.pid} answered POST {path} with status {response.status_code}: "
                f"{response.text}"
            )
        answer: dict[str, Any] = response.json()
        return answer


class EngineSlot:
    """Holds the engine that is running, if there is one.

    Args:
        sockets: the listening sockets that every engine gets
        host: forks the engines
    """

    def __init__(self, settings: ServerSettings, sockets: Sockets, host: ForkServer) -> None:
        self._settings = settings
        self._sockets = sockets
        self._host = host
        self.channel = SupervisorEnd()
        self._memory_before_mib: list[int] = []
        self._tokens_before = self._tokens = 0
        self.engine: Engine | None = None
        self.answers = False
        """True if the engine answered requests at the last status query."""
        self.dtype = ""
        """Data type of the engines' weights; "" until the first one has answered."""
        self.device, self.workers = "", 0
        """As in `ServerStatus`."""

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

    async def look(self, **word: str | bool) -> dict[str, Any] | None:
        """The engine's own status; None if no engine answers. `word`: what the engine is told; see
        `FollowGate.note`."""
        engine = self.engine
        if engine is None:
            return None
        try:
            seen = await engine.status(**word)
        except (EngineDoesNotAnswer, EngineRefused) as error:
            self.answers = False
            log.debug("engine.unresponsive", reason=str(error))
            return None
        if engine is not self.engine:
            return None
        self.answers = seen["state"] in ANSWERING
        self._tokens = seen["generation_tokens"]
        self.dtype, self.device, self.workers = seen["dtype"], seen["device"], seen["workers"]
        return seen

    async def end(self) -> int:
        """End the engine and its processes, and wait until its memory is free. Returns its exit
        code."""
        assert self.engine is not None, "call launch() first"
        code = await self.engine.end(self._settings.stop_grace_s)
        self.channel.close()
        # vLLM's processes become our children when the engine ends. They end then, and the last one
        # removes their shared memory.
        deadline = Deadline(ORPHANS_DEADLINE_S)
        while children() - self._host.pids and not deadline.has_passed:
            await asyncio.sleep(_POLL_S)
        end_orphans(self._host.pids)
        self.engine, self.answers = None, False
        self._tokens_before += self._tokens
        self._tokens = 0
        if not await memory_is_back(self._memory_before_mib):
            log.error(
                "gpu_memory.not_released",
                effect="the next engine starts anyway and may run out of memory",
            )
        return code
