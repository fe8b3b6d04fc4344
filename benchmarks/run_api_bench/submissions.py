"""What a submitted group costs, by the depth of the queue."""

from __future__ import annotations

from benchmarks.run_api_bench import load
from benchmarks.run_api_bench.metrics import Metric, OneIn, Reading
from benchmarks.run_api_bench.scenario import MS_PER_S, Rig, Scenario, at_depth, cpu_readings
from benchmarks.run_api_bench.systems import RunningServer

_GOAL = OneIn(4)


def measure(rig: Rig) -> list[Reading]:
    readings: list[Reading] = []
    with rig.system.running() as server:
        load.start_run(server)
        # what only the first requests cost is not measured
        load.submit(server.port, rig.workload.full_size, rig.sizes.distinct_groups)
        for depth in rig.sizes.depths:
            load.start_run(server)
            load.fill(server.port, depth)
            readings += _submit(server, rig, at_depth(depth))
    return readings


def _submit(server: RunningServer, rig: Rig, where: str) -> list[Reading]:
    count = rig.sizes.submissions
    before = server.cpu()
    report = load.submit(server.port, rig.workload.full_size, count)
    spent = server.cpu() - before
    generator_ms = report.generator_cpu_s * MS_PER_S / count
    return [
        *cpu_readings(spent, count, where, _GOAL),
        Reading(Metric(f"load generator CPU, {where}", "ms"), generator_ms),
        Reading(Metric(f"groups per second, {where}", "1/s"), report.groups_per_s),
    ]


SCENARIO = Scenario(
    name="submissions",
    title="Submitting groups",
    explanation="CPU time per group and groups per second: groups of 8 x 1024 tokens with "
    "log-probabilities, gzip, one per request, over 8 connections, into a queue that holds that "
    "many tiny groups (8 x 4 tokens) already.",
    measure=measure,
)
