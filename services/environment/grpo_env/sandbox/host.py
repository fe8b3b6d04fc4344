"""Programs on this machine, without protection: for code that is trusted."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from asyncio import CancelledError, create_task
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from grpo_core.process import killed_with_parent
from grpo_core.temporary import temporary_directory
from grpo_env.sandbox import relay
from grpo_env.sandbox.child import LimitedCommand, run_child
from grpo_env.sandbox.interface import Ended, Program, Sandbox


class OnHost(Sandbox):
    """`--sandbox none`: only time, memory and output have limits."""

    kind = "none"
    python = sys.executable

    async def _run(self, program: Program) -> Ended:
        """A process that leaves the program's session remains;
        if this process is killed, only the program itself ends with it."""
        with temporary_directory() as empty:
            async with _served(program.service) as url:
                cwd = program.directory or empty
                command = LimitedCommand(
                    program.argv,
                    program.variables(os.environ.get("PATH", os.defpath), str(empty), url),
                    program.limits,
                    stdin=program.stdin,
                    directory=cwd,
                    cwd=cwd,
                    prepare=killed_with_parent,
                )
                return await run_child(command)


@asynccontextmanager
async def _served(service: Path | None) -> AsyncIterator[str]:
    """The URL of the service, on a free port."""
    if service is None:
        yield ""
        return
    listener = socket.create_server(("127.0.0.1", 0))
    serving = create_task(relay.serve(listener, str(service)))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        serving.cancel()
        with contextlib.suppress(CancelledError):
            await serving
