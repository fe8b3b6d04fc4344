"""Programs on this machine, without protection: for code that is trusted."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from asyncio import CancelledError, create_task
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from grpo_core.process import killed_with_parent
from grpo_core.temporary import temporary_directory
from grpo_env.sandbox import relay
from grpo_env.sandbox.child import Command, run_child
from grpo_env.sandbox.interface import Ended, Limits, program_environment


class OnHost:
    """`--sandbox none`: only time, memory and output have limits."""

    kind = "none"
    python = sys.executable

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
        readable: Sequence[Path] = (),  # noqa: ARG002 - all of the host is
        service: Path | None = None,
        limits: Limits = Limits(),  # noqa: B008 - frozen
    ) -> Ended:
        """See `Sandbox.run`. A process that leaves the program's session remains;
        if this process is killed, only the program itself ends with it."""
        with temporary_directory() as empty:
            async with _served(service) as url:
                path = os.environ.get("PATH", os.defpath)
                variables = program_environment(path, str(empty), environment, url)
                cwd = directory or empty
                return await run_child(
                    Command(
                        argv,
                        variables,
                        limits,
                        _kill,
                        stdin,
                        cwd,
                        cwd=cwd,
                        prepare=killed_with_parent,
                    )
                )


async def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


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
