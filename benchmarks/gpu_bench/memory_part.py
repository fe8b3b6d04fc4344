"""One copy of the weights: what the driver counts before and after a trainer attaches."""

from __future__ import annotations

import torch

from benchmarks.gpu_bench.attached import attached, give_memory_back
from benchmarks.gpu_bench.bench import GIB, NO_GPU, Bench, at_most
from benchmarks.gpu_bench.budget import Deadline
from benchmarks.gpu_bench.figures import Limit
from benchmarks.gpu_bench.machine import settled_used_bytes
from benchmarks.gpu_bench.servers import ServerName

MAY_GROW = 0.1
"""Of the weights' size: tables, contexts and the driver's rounding. A copy would be 1."""


def measure(bench: Bench, deadline: Deadline) -> None:  # noqa: ARG001
    if not bench.on_gpu:
        bench.leave_out("memory", NO_GPU)
        return
    server = bench.server(ServerName.SHARED)
    give_memory_back()
    weights = bench.shape.parameters * bench.dtype.itemsize
    cache = bench.workload.cache_bytes
    with_server, allocated = settled_used_bytes(), torch.cuda.memory_allocated()
    with attached(server, str(bench.model)):
        torch.cuda.synchronize()
        grown = settled_used_bytes() - with_server
        held = torch.cuda.memory_allocated() - allocated
    size = Limit(value=weights / GIB, what="size of the weights")
    both = Limit(value=(weights + cache) / GIB, what="weights and cache")
    server_s = (with_server - bench.used_before) / GIB
    bench.say("memory", "used before any server", "GiB", [bench.used_before / GIB])
    bench.say("memory", "added by the server", "GiB", [server_s], limit=both)
    bench.say("memory", "added by a trainer that attaches", "GiB", [grown / GIB], limit=size)
    share, goal = [grown / weights], at_most(MAY_GROW)
    bench.say("memory", "the same over the size of the weights", "", share, goal=goal)
    bench.say("memory", "allocated by torch in the trainer", "GiB", [held / GIB], limit=size)
