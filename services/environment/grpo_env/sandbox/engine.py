"""Commands of Docker, for the sandboxes that are containers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from grpo_env.sandbox.child import Command, run_child
from grpo_env.sandbox.interface import MIB, Ended, Limits, SandboxUnusable

LABEL = "grpo-container"
"""Of every container that is made here."""
COMMAND_S = 120.0
"""For a command of Docker that takes a moment."""
OUTPUT_BYTES = 8 * MIB
"""That a docker command may write."""
_NOT_INSTALLED = "docker is not installed: see https://docs.docker.com/engine/install/"


async def docker(words: Sequence[str], seconds: float = COMMAND_S) -> Ended:
    """How a docker command ended. Raises `SandboxUnusable` if there is no docker."""
    limits = Limits(seconds=seconds, output_bytes=OUTPUT_BYTES)
    return await run_docker(
        Command(["docker", *words], dict(os.environ), limits, kill, measures_memory=False)
    )


async def run_docker(command: Command) -> Ended:
    """As `docker`."""
    try:
        return await run_child(command)
    except FileNotFoundError as error:
        raise SandboxUnusable(_NOT_INSTALLED) from error


async def succeed(words: Sequence[str], seconds: float = COMMAND_S) -> str:
    """Output of a docker command. Raises `SandboxUnusable` if it fails."""
    ended = await docker(words, seconds)
    if not ended.ok:
        raise SandboxUnusable(f"docker {words[0]} failed:\n{ended.for_model()}")
    return ended.output


async def kill(pid: int) -> None:
    """The docker command. What it started in a container is ended by that container's limit."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def variables(environment: Mapping[str, str]) -> list[str]:
    """Words of a docker command that set the variables of a program."""
    return [word for item in environment.items() for word in ("--env", "=".join(item))]


def succeed_at_start(words: Sequence[str], advice: str) -> None:
    """Raises `SandboxUnusable`, with advice, if a docker command fails."""
    try:
        done = subprocess.run(
            ["docker", *words], capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
    except FileNotFoundError as error:
        raise SandboxUnusable(_NOT_INSTALLED) from error
    if done.returncode:
        raise SandboxUnusable(advice.format(error=done.stderr.strip()))
