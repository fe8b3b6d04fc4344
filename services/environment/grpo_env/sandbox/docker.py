"""Programs in containers of their own, made by Docker."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from grpo_env.sandbox import relay
from grpo_env.sandbox.child import LimitedCommand
from grpo_env.sandbox.container import (
    LABEL,
    docker,
    run_docker,
    succeed,
    succeed_at_start,
    variables,
)
from grpo_env.sandbox.interface import (
    NOBODY,
    Ended,
    Limits,
    Program,
    Sandbox,
    SandboxFailed,
    give,
    is_root,
)

DEFAULT_IMAGE = "python:3.11-slim-bookworm"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SOCKET, _RELAY = "/run/service.sock", "/run/relay.py"
_START_S = 60.0
"""More time than any start of a container takes."""
_OLD = "24h"
_STATE = "{{.State.StartedAt}} {{.State.OOMKilled}} {{.State.ExitCode}}"
_NEVER = "0001-01-01"


class Docker(Sandbox):
    """One container for each run. The image needs `timeout`, and `python3` for a service and for
    Python."""

    python = "python3"

    def __init__(self, image: str = DEFAULT_IMAGE) -> None:
        self.image = image
        self.kind = f"docker:{image}"

    async def _run(self, program: Program) -> Ended:
        directory, service, limits = program.directory, program.service, program.limits
        # Rootless Docker also has users of its own, so every user may connect to the socket.
        await asyncio.to_thread(give, NOBODY, directory if is_root() else None, service)
        name = f"sandbox-{uuid.uuid4().hex}"
        given = program.variables(_PATH, "/tmp", relay.URL)
        inside = ["python3", _RELAY, _SOCKET, *program.argv] if service else program.argv
        # If this process is killed, the container ends by itself.
        life = ("--signal", "KILL", f"{limits.seconds + _START_S:g}")
        create = [
            *("create", "--interactive", "--pull", "never", "--name", name, "--label", LABEL),
            *_limited(limits),
            *_mounts(program),
            *variables(given),
            *("--entrypoint", "timeout", self.image, *life, *inside),
        ]
        start = ["docker", "start", "--attach", "--interactive", name]
        command = LimitedCommand(
            start,
            dict(os.environ),
            limits,
            stdin=program.stdin,
            directory=directory,
            measures_memory=False,  # the kernel limits it
        )
        async with _created(name, create, given):
            ended = await run_docker(command)
            state = await succeed(["inspect", "--format", _STATE, name])
        started_at, is_killed, status = state.split()
        if started_at.startswith(_NEVER):
            raise SandboxFailed(f"docker start failed: {ended.errors.strip() or ended.reason}")
        if ended.reason == "finished" and ended.status != int(status):
            raise SandboxFailed(f"docker lost the program: {ended.errors.strip()}")
        is_memory = is_killed == "true" and ended.reason == "finished"
        return replace(ended, reason="memory") if is_memory else ended


@asynccontextmanager
async def _created(
    name: str, create: Sequence[str], given: Mapping[str, str]
) -> AsyncIterator[None]:
    """Make a container, and remove it with all its processes. Once begun, it is made: an engine
    may make it when its command has been killed."""
    creating = asyncio.create_task(succeed(create, given=given))
    try:
        await asyncio.shield(creating)
        yield
    finally:
        await asyncio.shield(_remove(name, creating))


async def _remove(name: str, creating: asyncio.Task[str]) -> None:
    await asyncio.wait([creating])
    await docker(["rm", "--force", "--volumes", name])


def _limited(limits: Limits) -> Iterator[str]:
    yield from ("--network", "none", "--read-only", "--cap-drop", "ALL")
    yield from ("--security-opt", "no-new-privileges", "--ipc", "private", "--init")
    memory = str(limits.memory_bytes)
    yield from ("--memory", memory, "--memory-swap", memory, "--oom-score-adj", "1000")
    yield from ("--pids-limit", str(limits.processes))
    yield from ("--ulimit", f"cpu={limits.cpu_s}:{limits.cpu_s + 1}", "--ulimit", "core=0")
    yield from ("--ulimit", f"fsize={limits.file_bytes}")
    yield from ("--ulimit", f"nofile={limits.open_files}")
    yield from ("--log-driver", "none")


def _mounts(program: Program) -> Iterator[str]:
    directory, service = program.directory, program.service
    size = program.limits.file_bytes
    # Others than this user may not read what is mounted.
    is_own = not is_root() and bool(directory or program.readable or service)
    user = f"{os.geteuid()}:{os.getegid()}" if is_own else f"{NOBODY}:{NOBODY}"
    yield from ("--user", user)
    yield from ("--tmpfs", f"/tmp:rw,exec,nosuid,nodev,size={size},mode=1777")
    yield from ("--shm-size", str(size))
    for path in program.readable:
        yield from ("--volume", f"{path.resolve(strict=True)}:{path.absolute()}:ro")
    if directory:
        yield from ("--volume", f"{directory}:{directory}")
    if service:
        yield from ("--volume", f"{service.resolve()}:{_SOCKET}")
        yield from ("--volume", f"{relay.__file__}:{_RELAY}:ro")
    yield from ("--workdir", str(directory or "/tmp"))


def require_docker(image: str) -> None:
    """Remove what killed processes left long ago. Raises `SandboxUnusable`: no engine answers or
    the image is not there."""
    advice = f"--sandbox docker:{image}: {{error}}; start Docker and `docker pull {image}`"
    succeed_at_start(["image", "inspect", "--format", "{{.Id}}", image], advice)
    old = ["--filter", f"label={LABEL}", "--filter", f"until={_OLD}"]
    succeed_at_start(["container", "prune", "--force", *old], advice)
