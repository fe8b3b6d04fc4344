"""Programs in containers of their own, made by Docker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import uuid
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from grpo_env.sandbox import relay
from grpo_env.sandbox.child import Command, run_child
from grpo_env.sandbox.interface import (
    Ended,
    Limits,
    SandboxUnusable,
    program_environment,
)
from grpo_env.sandbox.users import NOBODY, give, is_root

DEFAULT_IMAGE = "python:3.11-slim-bookworm"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SOCKET, _RELAY = "/run/service.sock", "/run/relay.py"
_START_S = 60.0
"""To make the container and to end it."""
_DOCKER_FAILED = 125
_PROBE_S = 20


class Docker:
    """One container for each run. The image needs `python3` for a service and for Python."""

    python = "python3"

    def __init__(self, image: str = DEFAULT_IMAGE) -> None:
        self.image = image
        self.kind = f"docker:{image}"

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
        readable: Sequence[Path] = (),
        service: Path | None = None,
        limits: Limits = Limits(),  # noqa: B008 - frozen
    ) -> Ended:
        """See `Sandbox.run`."""
        directory = directory.resolve(strict=True) if directory else None
        if is_root():
            await asyncio.to_thread(give, NOBODY, directory, service)
        name = f"sandbox-{uuid.uuid4().hex}"
        variables = program_environment(_PATH, "/tmp", environment, relay.URL)
        inside = ["python3", _RELAY, _SOCKET, *argv] if service else [*argv]
        command = [
            *("docker", "create", "--interactive", "--pull", "never", "--name", name),
            *_limited(limits),
            *_mounts(directory, readable, service, limits),
            *(word for item in variables.items() for word in ("--env", "=".join(item))),
            *(self.image, *inside),
        ]
        await _docker(command[1:])
        try:
            start = ["docker", "start", "--attach", "--interactive", name]
            ended = await run_child(
                Command(
                    start,
                    dict(os.environ),
                    limits,
                    _kill,
                    stdin,
                    directory,
                    measures_memory=False,  # the kernel limits it
                )
            )
            killed = await _docker(["inspect", "--format", "{{.State.OOMKilled}}", name])
        finally:
            await asyncio.shield(_docker(["rm", "--force", "--volumes", name]))
        is_memory = killed.strip() == "true" and ended.reason == "finished"
        return replace(ended, reason="memory") if is_memory else ended


async def _kill(pid: int) -> None:
    """The container itself is removed afterwards, with all its processes."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


async def _docker(words: Sequence[str]) -> str:
    """Output of a docker command. Raises `SandboxUnusable` if it fails."""
    try:
        child = await asyncio.create_subprocess_exec(
            "docker", *words, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
        )
    except FileNotFoundError as error:
        raise SandboxUnusable(_NOT_INSTALLED) from error
    output, errors = await child.communicate()
    if child.returncode:
        raise SandboxUnusable(
            f"docker {words[0]} failed: {errors.decode(errors='replace').strip()}"
        )
    return output.decode()


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


def _mounts(
    directory: Path | None, readable: Sequence[Path], service: Path | None, limits: Limits
) -> Iterator[str]:
    is_own = directory is not None and not is_root()
    user = f"{os.geteuid()}:{os.getegid()}" if is_own else f"{NOBODY}:{NOBODY}"
    yield from ("--user", user)
    yield from ("--tmpfs", f"/tmp:rw,exec,nosuid,nodev,size={limits.file_bytes},mode=1777")
    yield from ("--shm-size", str(limits.file_bytes))
    for path in readable:
        yield from ("--volume", f"{path.resolve(strict=True)}:{path.absolute()}:ro")
    if directory:
        yield from ("--volume", f"{directory}:{directory}")
    if service:
        yield from ("--volume", f"{service.resolve()}:{_SOCKET}")
        yield from ("--volume", f"{relay.__file__}:{_RELAY}:ro")
    yield from ("--workdir", str(directory or "/tmp"))


_NOT_INSTALLED = "docker is not installed: see https://docs.docker.com/engine/install/"


def require_docker(image: str) -> None:
    """Raises `SandboxUnusable` if no engine answers or the image is not there."""
    try:
        done = subprocess.run(
            ["docker", "image", "inspect", "--format", "{{.Id}}", image],
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise SandboxUnusable(_NOT_INSTALLED) from error
    if done.returncode:
        raise SandboxUnusable(
            f"--sandbox docker:{image}: {done.stderr.strip()}; start Docker and `docker pull "
            f"{image}`"
        )
