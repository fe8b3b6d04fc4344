"""Docker: its commands, and containers that stay for several commands."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from grpo_env.sandbox.child import LimitedCommand, run_child
from grpo_env.sandbox.interface import MIB, Ended, Limits, SandboxFailed, SandboxUnusable

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
_LONGEST_LIFE_S = 6 * 3600
"""After it, a container whose process was killed ends and is removed by Docker."""
_GRACE_S = 30.0
_NO_ENGINE = "Cannot connect to the Docker daemon"
_OF_DOCKER = ("Error response from daemon", _NO_ENGINE)


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
    # What it started in a container is ended by that container's limit.
    return await run_docker(
        LimitedCommand(["docker", *words], os.environ | hidden, limits, measures_memory=False)
    )


async def run_docker(command: LimitedCommand) -> Ended:
    """Run a Docker command. Raises `SandboxUnusable`: there is no docker."""
    try:
        return await run_child(command)
    except FileNotFoundError as error:
        raise SandboxUnusable(_NOT_INSTALLED) from error


async def succeed(
    words: Sequence[str],
    seconds: float = COMMAND_S,
    given: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Output of a docker command; see `docker`. Raises `SandboxFailed` if it fails."""
    ended = await docker(words, seconds, given)
    if not ended.ok:
        raise SandboxFailed(f"docker {words[0]} failed:\n{ended.for_model()}")
    return ended.output


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


@dataclass(frozen=True)
class Resources:
    """What a container may use.

    network: as `docker create --network` takes it; environment: variables of its programs.
    """

    memory_mb: int = 2048
    cpus: float = 1.0
    processes: int = 512
    network: str = "none"
    workdir: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


class Container:
    """A running container. Its files stay from one command to the next."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def run(
        self,
        command: str,
        seconds: float,
        *,
        user: str | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> Ended:
        """Run a command with bash, in the working directory. Its processes end with the limit; what
        a command leaves in the background goes on.

        Raises:
            SandboxFailed: the container does not run any more, or Docker does not answer.
        """
        words = ["exec", *variables(environment)]
        words += ["--user", user] if user else []
        inside = ["timeout", "--signal", "KILL", f"{seconds:g}", "bash", "-c", command]
        ended = await docker([*words, self.name, *inside], seconds + _GRACE_S, environment)
        if ended.status == 1 and ended.errors.startswith(_OF_DOCKER):
            # A command may write what looks like an error of Docker.
            state = await docker(["inspect", "--format", "{{.State.Running}}", self.name])
            if state.errors.startswith(_NO_ENGINE):
                raise SandboxFailed(state.errors.strip())
            if state.output.strip() != "true":
                raise SandboxFailed(f"a command ended its container: {state.for_model()}")
        if ended.status == 128 + signal.SIGKILL and ended.seconds >= seconds:
            return replace(ended, reason="timeout")
        return ended

    async def copy_in(self, directory: Path, target: str) -> None:
        """Put the files of a directory where `target` says, instead of what is there. Raises
        `SandboxFailed`: it fails."""
        await self.run(f"rm -rf {target}", COMMAND_S, user="root")
        await succeed(["cp", f"{directory}/.", f"{self.name}:{target}"])


@asynccontextmanager
async def container(image: str, resources: Resources) -> AsyncIterator[Container]:
    """Start a container of an image, and remove it at the end. Raises `SandboxFailed`: Docker does
    not start it."""
    name = f"{LABEL}-{uuid.uuid4().hex}"
    limits = ["--memory", f"{resources.memory_mb}m", "--memory-swap", f"{resources.memory_mb}m"]
    limits += ["--cpus", f"{resources.cpus:g}", "--pids-limit", str(resources.processes)]
    # The first process of a container cannot be killed from inside, and bash ends zombies.
    words = ["run", "--detach", "--interactive", "--rm", "--name", name, "--label", LABEL, *limits]
    words += ["--network", resources.network, "--security-opt", "no-new-privileges"]
    words += ["--oom-score-adj", "1000", "--log-driver", "none"]
    words += ["--workdir", resources.workdir] if resources.workdir else []
    words += [*variables(resources.environment), "--entrypoint", "bash", image]
    try:
        await succeed([*words, "-c", f"read -t {_LONGEST_LIFE_S}"], given=resources.environment)
        yield Container(name)
    finally:
        await asyncio.shield(docker(["rm", "--force", "--volumes", name]))
