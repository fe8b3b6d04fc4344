"""Commands of Docker, for the sandboxes that are containers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from grpo_env.sandbox.child import Command, run_child
from grpo_env.sandbox.interface import MIB, Ended, Limits, SandboxUnusable

LABEL = "grpo-container"
"""Of every container that is made here."""
COMMAND_S = 120.0
"""For a command of Docker that takes a moment."""
OUTPUT_BYTES = 8 * MIB
"""That a docker command may write."""
_OF_CLIENT = re.compile(
    r"PATH|HOME|TMPDIR|(DOCKER|LD|GLIBC|OTEL|XDG|SSL_CERT)_\w+|(HTTPS?|ALL|NO)_PROXY"
    r"|GO(DEBUG|GC|MAXPROCS|MEMLIMIT|TRACEBACK)",
    re.IGNORECASE,
)
"""Variables that would change the docker command itself."""
_NOT_INSTALLED = "docker is not installed: see https://docs.docker.com/engine/install/"


async def docker(
    words: Sequence[str],
    seconds: float = COMMAND_S,
    given: Mapping[str, str] = MappingProxyType({}),
) -> Ended:
    """How a docker command ended.

    Args: given: variables that `variables` names in `words`

    Raises:
        SandboxUnusable: there is no docker.
    """
    limits = Limits(seconds=seconds, output_bytes=OUTPUT_BYTES)
    hidden = {name: value for name, value in given.items() if not _OF_CLIENT.fullmatch(name)}
    return await run_docker(
        Command(["docker", *words], os.environ | hidden, limits, kill, measures_memory=False)
    )


async def run_docker(command: Command) -> Ended:
    """As `docker`."""
    try:
        return await run_child(command)
    except FileNotFoundError as error:
        raise SandboxUnusable(_NOT_INSTALLED) from error


async def succeed(
    words: Sequence[str],
    seconds: float = COMMAND_S,
    given: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Output of a docker command; see `docker`. Raises `SandboxUnusable` if it fails."""
    ended = await docker(words, seconds, given)
    if not ended.ok:
        raise SandboxUnusable(f"docker {words[0]} failed:\n{ended.for_model()}")
    return ended.output


async def kill(pid: int) -> None:
    """The docker command. What it started in a container is ended by that container's limit."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def variables(given: Mapping[str, str]) -> list[str]:
    """Words of a docker command that set the variables of a program. Other users can read command
    lines, so docker finds the values among its own variables."""
    shown = (f"{n}={v}" if _OF_CLIENT.fullmatch(n) else n for n, v in given.items())
    return [word for text in shown for word in ("--env", text)]


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
