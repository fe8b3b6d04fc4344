"""Is the memory of an engine that has ended free again?

On the host that follows from its processes being gone, all of which the supervisor reaps. On a GPU
the driver frees a process's memory some time after its end, and an engine that starts too early
finds too little. What others take there meanwhile, a trainer most of all, does not come back:
memory that no longer falls is as free as it gets.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from dataclasses import dataclass

import structlog

log = structlog.get_logger()

GPU_QUERY = ("--query-gpu=memory.used", "--format=csv,noheader,nounits")
QUERY_TIMEOUT_S = 10.0
DEADLINE_S = 60.0
SLACK_MIB = 512
"""What others on the GPU may have taken meanwhile without being waited for."""
SETTLED_S = 3.0
"""Memory in use that has not fallen for so long is not the engine's."""
_POLL_S = 0.5


@dataclass(frozen=True)
class GpuMemory:
    """MiB in use on each visible GPU; empty where there is none."""

    used_mib: tuple[int, ...] = ()

    def exceeds(self, other: GpuMemory, by_mib: int = 0) -> bool:
        pairs = zip(self.used_mib, other.used_mib, strict=False)
        return any(ours > theirs + by_mib for ours, theirs in pairs)


def gpu_memory() -> GpuMemory:
    """By `nvidia-smi`; none where that is not there or does not work."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return GpuMemory()
    try:
        answer = subprocess.run(
            [command, *GPU_QUERY],
            capture_output=True,
            text=True,
            timeout=QUERY_TIMEOUT_S,
            check=True,
        )
        return GpuMemory(tuple(int(line) for line in answer.stdout.split()))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        log.warning("nvidia-smi does not say how much memory is in use", reason=str(error))
        return GpuMemory()


async def memory_is_back(before: GpuMemory, deadline_s: float = DEADLINE_S) -> bool:
    """Wait until no more GPU memory is in use than `before` the engine started, or until it stays
    what it is; False where it goes on falling until the deadline."""
    if not before.used_mib:
        return True
    clock = asyncio.get_running_loop().time
    give_up_at = clock() + deadline_s
    lowest, settled_at = await asyncio.to_thread(gpu_memory), clock() + SETTLED_S
    now = lowest
    while now.exceeds(before, by_mib=SLACK_MIB):
        if clock() >= settled_at:
            log.info("others use GPU memory", used_mib=now.used_mib, before_mib=before.used_mib)
            return True
        if clock() >= give_up_at:
            return False
        await asyncio.sleep(_POLL_S)
        now = await asyncio.to_thread(gpu_memory)
        if lowest.exceeds(now):
            lowest, settled_at = now, clock() + SETTLED_S
    return True
