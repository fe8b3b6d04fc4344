"""How much memory a queued group takes."""

from __future__ import annotations

from benchmarks.run_api_bench import load
from benchmarks.run_api_bench.metrics import Metric, OneIn, Reading
from benchmarks.run_api_bench.scenario import Rig, Scenario

_BYTES_PER_KIB = 1024
_METRIC = Metric("memory per queued group", "KiB", OneIn(6))


def measure(rig: Rig) -> list[Reading]:
    bodies, groups = rig.workload.full_size, rig.sizes.memory_groups
    with rig.system.running() as server:
        load.start_run(server)
        load.submit(server.port, bodies, rig.sizes.distinct_groups)
        before = server.rss_bytes()
        load.submit(server.port, bodies, groups)
        grown = server.rss_bytes() - before
    return [Reading(_METRIC, grown / groups / _BYTES_PER_KIB)]


SCENARIO = Scenario(
    name="memory",
    title="Memory",
    explanation="Growth of resident memory (server, its children and Redis) while full-size groups "
    "are queued, after others have warmed the server up.",
    measure=measure,
)
