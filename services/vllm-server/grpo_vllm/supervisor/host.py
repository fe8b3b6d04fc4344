"""What the server takes from its host: room in /dev/shm and on the GPUs, and listening sockets that
stay open while one engine replaces another."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import structlog

from grpo_core.closing import ClosesOnExit
from grpo_core.deadline import Deadline
from grpo_core.errors import GrpoError
from grpo_core.listening import listen
from grpo_core.tree.server import SHARED_MEMORY, ServerSettings, worker_count
from grpo_vllm.http_server import BACKLOG

log = structlog.get_logger()

MIB = 1024 * 1024
BROADCAST_MIB = 160
"""Size of vLLM's queue to all workers: 10 chunks of VLLM_MQ_MAX_CHUNK_BYTES_MB (16)."""
RESPONSE_MIB = 240
"""Size of the queue from one worker: 10 chunks of 24 MiB."""
GPU_QUERY = ("--query-gpu=memory.used", "--format=csv,noheader,nounits")
QUERY_TIMEOUT_S = 10.0
DEADLINE_S = 60.0
SLACK_MIB = 512
"""Other processes on the GPU may use this much more memory without delaying the next engine."""
SETTLED_S = 3.0
"""Memory that is still in use after so long without a decrease belongs to other processes."""
_POLL_S = 0.5


class SharedMemoryTooSmall(GrpoError):
    """/dev/shm is too small for the messages between vLLM's workers."""


def require_shared_memory(engine_arguments: Sequence[str]) -> None:
    """Raises `SharedMemoryTooSmall` if the queues of vLLM's workers do not fit into /dev/shm. A
    single worker needs none. vLLM detects the lack itself, but only after half a minute of imports.
    """
    workers = worker_count(engine_arguments)
    if workers == 1 or not SHARED_MEMORY.is_dir():
        return
    needed = BROADCAST_MIB + workers * RESPONSE_MIB
    size = os.statvfs(SHARED_MEMORY)
    free = size.f_bavail * size.f_frsize // MIB
    if free < needed:
        raise SharedMemoryTooSmall(
            f"{SHARED_MEMORY} has {free} MiB free, but {workers} workers need {needed} MiB; set "
            "SHM_SIZE for docker compose, or pass --shm-size or --ipc host to docker run"
        )


@dataclass(frozen=True)
class Sockets(ClosesOnExit):
    """Listening sockets. `private_path`: the path of the unix socket to the engine."""

    public: socket.socket
    control: socket.socket | None
    health: socket.socket
    private: socket.socket
    private_path: Path

    @classmethod
    def open(cls, settings: ServerSettings, directory: Path) -> Self:
        """Raises `OSError` with the address that is in use.

        Args: directory: for the socket to the engine
        """
        assert settings.health_port is not None, "the settings compute a default"
        public = _listening(settings.host, settings.port)
        control = None
        if settings.control_port is not None:
            control = _listening(settings.control_host, settings.control_port)
        health = _listening(settings.control_host, settings.health_port)
        path = directory / "private.sock"
        private = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        private.bind(str(path))
        private.listen(BACKLOG)
        return cls(public, control, health, private, path)

    def close(self) -> None:
        for each in (self.public, self.control, self.health, self.private):
            if each is not None:
                each.close()


def _listening(host: str, port: int) -> socket.socket:
    try:
        # From here on the kernel queues new connections instead of refusing them.
        return listen(host, port, BACKLOG)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error


def gpu_memory_mib() -> list[int]:
    """Memory in use on each visible GPU, from `nvidia-smi`; [] if that is missing or fails."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    try:
        answer = subprocess.run(
            [command, *GPU_QUERY],
            capture_output=True,
            text=True,
            timeout=QUERY_TIMEOUT_S,
            check=True,
        )
        return [int(line) for line in answer.stdout.split()]
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        log.warning("gpu_memory.unknown", reason=f"nvidia-smi failed: {error}")
        return []


def _exceeds(used_mib: list[int], other_mib: list[int], by_mib: int = 0) -> bool:
    pairs = zip(used_mib, other_mib, strict=False)
    return any(used > other + by_mib for used, other in pairs)


async def memory_is_back(before_mib: list[int]) -> bool:
    """Wait until the GPU memory in use has fallen to `before_mib`, or has stopped falling. Returns
    False if it is still falling at the deadline.

    The driver frees a process's GPU memory some time after the process has ended. An engine that
    starts too early finds too little memory. Memory that other processes have taken meanwhile, for
    example a trainer, is not freed, so the wait ends when the memory in use stops falling.
    """
    if not before_mib:
        return True
    deadline, settled = Deadline(DEADLINE_S), Deadline(SETTLED_S)
    now = lowest = await asyncio.to_thread(gpu_memory_mib)
    while _exceeds(now, before_mib, by_mib=SLACK_MIB):
        if settled.has_passed:
            log.info(
                "gpu_memory.used_by_others", used_mib=now, used_before_last_engine_mib=before_mib
            )
            return True
        if deadline.has_passed:
            return False
        await asyncio.sleep(_POLL_S)
        now = await asyncio.to_thread(gpu_memory_mib)
        if _exceeds(lowest, now):
            lowest, settled = now, Deadline(SETTLED_S)
    return True
