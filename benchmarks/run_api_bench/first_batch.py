"""The first `GET /batch` of a trainer, by the depth of the queue."""

from __future__ import annotations

from benchmarks.run_api_bench import load
from benchmarks.run_api_bench.metrics import Metric, OneIn, Reading
from benchmarks.run_api_bench.scenario import MS_PER_S, Rig, Scenario
from benchmarks.run_api_bench.systems import RunningServer
from benchmarks.run_api_bench.workload import FULL_SIZE

_GOAL = OneIn(50)
_GOAL_DEPTH = 10_000
_ONE_BATCH = load.BATCH_SEQUENCES // FULL_SIZE.sequences
"""Groups that fill one batch."""


def measure(rig: Rig) -> list[Reading]:
    with rig.system.running() as server:
        readings = [*_tiny(server, _ONE_BATCH), *_full_size(server, rig, _ONE_BATCH)]
        for depth in rig.sizes.depths:
            readings += _tiny(server, depth) if depth else []
        if rig.sizes.full_size_depth:
            readings += _full_size(server, rig, rig.sizes.full_size_depth)
    return readings


def _tiny(server: RunningServer, depth: int) -> list[Reading]:
    load.start_run(server)
    load.fill(server.port, depth)
    return _fetch(server, depth, "tiny")


def _full_size(server: RunningServer, rig: Rig, depth: int) -> list[Reading]:
    load.start_run(server)
    load.submit(server.port, rig.workload.full_size, depth)
    return _fetch(server, depth, "full-size")


def _fetch(server: RunningServer, depth: int, size: str) -> list[Reading]:
    queued = f"{depth:,} {size} groups"
    goal = _GOAL if depth == _GOAL_DEPTH else None
    before = server.cpu()
    seconds = load.fetch_batch(server.port).seconds
    spent = server.cpu() - before
    return [
        Reading(Metric(f"GET /batch, {queued}", "ms", goal), seconds * MS_PER_S),
        Reading(Metric(f"CPU with Redis, {queued}", "ms"), spent.total * MS_PER_S),
    ]


SCENARIO = Scenario(
    name="first-batch",
    title="First GET /batch",
    explanation="A batch of 64 sequences from a queue that holds that many groups: wall time until "
    "the whole answer is read, gzip-encoded as the `requests` library asks for it, and the CPU "
    "time of the server and Redis meanwhile.",
    measure=measure,
)
