"""`GET /batch` where environments claim a share of every batch."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from statistics import linear_regression

from benchmarks.run_api_bench import load
from benchmarks.run_api_bench.metrics import AtMost, Metric, Reading
from benchmarks.run_api_bench.scenario import MS_PER_S, Rig, Scenario
from benchmarks.run_api_bench.systems import RunningServer

_MINIMUMS = (0.25, 0.5)
_LINEAR = AtMost(1.0)


def measure(rig: Rig) -> list[Reading]:
    deeper = rig.sizes.deeper_minimum_depths if rig.system.name == "run-api" else ()
    depths = (*rig.sizes.minimum_depths, *deeper)
    with rig.system.running() as server:
        _fetch_seconds(server, depths[0])  # what only the first request costs
        seconds = [_fetch_seconds(server, depth) for depth in depths]
    return [
        Reading(Metric("growth exponent", "", _LINEAR), growth_exponent(depths, seconds)),
        *(
            Reading(Metric(f"GET /batch, {depth:,} groups", "ms"), value * MS_PER_S)
            for depth, value in zip(depths, seconds, strict=True)
        ),
    ]


def growth_exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """k of the fit of values by c * size^k: the slope between the logarithms."""
    return linear_regression([log(n) for n in sizes], [log(v) for v in values]).slope


def _fetch_seconds(server: RunningServer, depth: int) -> float:
    load.start_run(server, minimums=_MINIMUMS)
    load.fill(server.port, depth, env_ids=range(len(_MINIMUMS)))
    return load.fetch_batch(server.port).seconds


SCENARIO = Scenario(
    name="minimums",
    title="GET /batch with minimum allocations",
    explanation="Two environments claim a quarter and half of every batch; each has queued half of "
    "the tiny groups. The exponent is that of a power of the depth, fitted to the times.",
    measure=measure,
)
