"""Is there room in /dev/shm for what vLLM's worker processes tell each other?

vLLM finds out for itself, after importing for half a minute, in each of its processes, and only for
the first buffer that does not fit.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from grpo_core.errors import GrpoError

DIRECTORY = Path("/dev/shm")
MIB = 1024 * 1024
BROADCAST_MIB = 160
"""vLLM's MessageQueue to all workers: 10 chunks of VLLM_MQ_MAX_CHUNK_BYTES_MB (16)."""
RESPONSE_MIB = 240
"""Each worker's MessageQueue back: 10 chunks of 24 MiB."""
PARALLEL_FLAGS = {
    **dict.fromkeys(("--tensor-parallel-size", "-tp"), "tensor"),
    **dict.fromkeys(("--pipeline-parallel-size", "-pp"), "pipeline"),
}


class SharedMemoryTooSmall(GrpoError):
    """The workers could not exchange messages."""


def require_shared_memory(engine_arguments: Sequence[str], directory: Path = DIRECTORY) -> None:
    """Raises `SharedMemoryTooSmall` where the queues between so many workers do not fit. A single
    worker runs inside the engine and needs none."""
    workers = worker_count(engine_arguments)
    if workers == 1 or not directory.is_dir():
        return
    needed = BROADCAST_MIB + workers * RESPONSE_MIB
    size = os.statvfs(directory)
    free = size.f_bavail * size.f_frsize // MIB
    if free < needed:
        raise SharedMemoryTooSmall(
            f"{directory} has {free} MiB free, and {workers} workers need {needed} MiB; in "
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
