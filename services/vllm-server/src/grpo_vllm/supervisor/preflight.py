"""Checks before an engine starts: is there room in /dev/shm for vLLM's worker processes, and is the
GPU memory of the engine that ended free again?"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import structlog

from grpo_core.deadline import Deadline
from grpo_core.errors import GrpoError

SHARED_MEMORY = Path("/dev/shm")
MIB = 1024 * 1024
BROADCAST_MIB = 160
"""vLLM's MessageQueue to all workers: 10 chunks of VLLM_MQ_MAX_CHUNK_BYTES_MB (16)."""
RESPONSE_MIB = 240
"""Each worker's MessageQueue back: 10 chunks of 24 MiB."""
PARALLEL_FLAGS = {
    **dict.fromkeys(("--tensor-parallel-size", "-tp"), "tensor"),
    **dict.fromkeys(("--pipeline-parallel-size", "-pp"), "pipeline"),
}


log = structlog.get_logger()
GPU_QUERY = ("--query-gpu=memory.used", "--format=csv,noheader,nounits")
QUERY_TIMEOUT_S = 10.0
DEADLINE_S = 60.0
SLACK_MIB = 512
"""What others on the GPU may have taken meanwhile without being waited for."""
SETTLED_S = 3.0
"""Memory in use that has not fallen for so long is not the engine's."""
_POLL_S = 0.5


class SharedMemoryTooSmall(GrpoError):
    """The workers could not exchange messages."""


def require_shared_memory(engine_arguments: Sequence[str]) -> None:
    """A single worker runs inside the engine and needs none.

    vLLM finds out for itself, after importing for half a minute, in each of its processes, and only
    for the first buffer that does not fit.

    Raises:
        SharedMemoryTooSmall: the queues between so many workers do not fit.
    """
    workers = worker_count(engine_arguments)
    if workers == 1 or not SHARED_MEMORY.is_dir():
        return
    needed = BROADCAST_MIB + workers * RESPONSE_MIB
    size = os.statvfs(SHARED_MEMORY)
    free = size.f_bavail * size.f_frsize // MIB
    if free < needed:
        raise SharedMemoryTooSmall(
            f"{SHARED_MEMORY} has {free} MiB free, and {workers} workers need {needed} MiB; in "
            "containers set SHM_SIZE, or docker run --shm-size, or share the host's (--ipc host)"
        )


def worker_count(engine_arguments: Sequence[str]) -> int:
    """Processes that vLLM starts for one model. What is no number is vLLM's to refuse."""
    sizes = {"tensor": 1, "pipeline": 1}
    words = [part for word in engine_arguments for part in word.split("=", 1)]
    for flag, value in itertools.pairwise(words):
        kind = PARALLEL_FLAGS.get(flag.replace("_", "-"))
        if kind is not None and value.isdecimal():
            sizes[kind] = max(1, int(value))
    return sizes["tensor"] * sizes["pipeline"]


def gpu_memory_mib() -> list[int]:
    """In use on each visible GPU, by `nvidia-smi`; [] where that is not there or does not work."""
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
        log.warning("nvidia-smi does not say how much memory is in use", reason=str(error))
        return []


def _exceeds(used_mib: list[int], other_mib: list[int], by_mib: int = 0) -> bool:
    pairs = zip(used_mib, other_mib, strict=False)
    return any(used > other + by_mib for used, other in pairs)


async def memory_is_back(before_mib: list[int]) -> bool:
    """Wait until no more GPU memory is in use than `before_mib` the engine started, or until it
    stays what it is; False where it goes on falling until the deadline.

    On the host that follows from the engine's processes being gone, all of which the supervisor
    reaps. On a GPU the driver frees a process's memory some time after its end, and an engine that
    starts too early finds too little. What others take there meanwhile, a trainer most of all, does
    not come back: memory that no longer falls is as free as it gets.
    """
    if not before_mib:
        return True
    deadline, settled = Deadline(DEADLINE_S), Deadline(SETTLED_S)
    now = lowest = await asyncio.to_thread(gpu_memory_mib)
    while _exceeds(now, before_mib, by_mib=SLACK_MIB):
        if settled.has_passed:
            log.info("others use GPU memory", used_mib=now, before_mib=before_mib)
            return True
        if deadline.has_passed:
            return False
        await asyncio.sleep(_POLL_S)
        now = await asyncio.to_thread(gpu_memory_mib)
        if _exceeds(lowest, now):
            lowest, settled = now, Deadline(SETTLED_S)
    return True
