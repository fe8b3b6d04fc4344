"""The supervisor's side of the fork server: starts it, has it fork engines and watches both."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence

import structlog

from grpo_core.process.orphans import killed_with_parent
from grpo_vllm.forkserver.protocol import EnginePlan, receive_fact, send_plan

log = structlog.get_logger()

ENGINE_MODULE = "grpo_vllm.engine.process"
SEND_DEADLINE_S = 30.0
END_DEADLINE_S = 10.0


class ForkServer:
    """Starts the fork server's process with the first engine, and again if the process has died.
    Needs a running event loop.

    Args:
        module: the module that the fork server imports; see `grpo_vllm.forkserver.server`
        options: the command line of the engines
    """

    def __init__(self, module: str, options: Sequence[str]) -> None:
        self._command = [sys.executable, "-m", "grpo_vllm.forkserver.server"]
        self._arguments = [module, *options]
        self._process: asyncio.subprocess.Process | None = None
        self._socket: socket.socket | None = None

    @property
    def pids(self) -> frozenset[int]:
        """The fork server's process id; empty if it is not running."""
        running = self._process is not None and self._process.returncode is None
        return frozenset({self._process.pid} if self._process and running else ())

    async def start_engine(self, plan: EnginePlan) -> ForkedEngine:
        """Returns at once. The first engine starts when the fork server has finished importing."""
        if not self.pids:
            await self._start()
        assert self._process is not None
        assert self._socket is not None
        engine = ForkedEngine(self._process, self._socket)
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
                *(*self._command, str(theirs.fileno()), *self._arguments),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                preexec_fn=killed_with_parent,
            )


class ForkedEngine:
    """An engine that was requested from the fork server.

    Args:
        server: the fork server's process
        facts: the socket on which the fork server reports this engine's start and end
    """

    def __init__(self, server: asyncio.subprocess.Process, facts: socket.socket) -> None:
        self.pid = 0
        """The process id; 0 until the fork server has forked the engine."""
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = loop.create_future()
        """The engine's exit code. A negative code is the signal that ended it."""
        self._server = server
        self._pidfd: int | None = None
        self._descriptor = facts.fileno()
        self._facts = facts
        loop.add_reader(self._descriptor, self._read)
        self._watching = asyncio.create_task(self._watch_server())

    def send(self, number: signal.Signals) -> None:
        """Send the engine a signal. If it does not exist yet, kill the fork server instead."""
        with contextlib.suppress(ProcessLookupError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, number)
            elif not self.ended.done():
                self._server.kill()

    def close(self) -> None:
        """Call this when the engine has ended."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

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
        log.error("fork_server.ended", status=code)
        self._end(code or 1)

    def _end(self, code: int) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        if not self.ended.done():
            self.ended.set_result(code)
