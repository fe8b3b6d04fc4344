"""One thing to measure: what it is called, how it is read, and how it is done on one server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.run_api_bench.metrics import Metric, OneIn, Reading
from benchmarks.run_api_bench.settings import ScenarioName, Sizes
from benchmarks.run_api_bench.systems import CpuSeconds, System
from benchmarks.run_api_bench.workload import Workload

MS_PER_S = 1e3


@dataclass(frozen=True)
class Rig:
    """What a scenario measures with."""

    system: System
    sizes: Sizes
    workload: Workload


@dataclass(frozen=True)
class Scenario:
    """`measure` starts the servers that it needs and ends them; `explanation` is for the report."""

    name: ScenarioName
    title: str
    explanation: str
    measure: Callable[[Rig], list[Reading]]


def at_depth(depth: int) -> str:
    return f"depth {depth:,}"


def cpu_readings(
    spent: CpuSeconds, calls: int, where: str, goal: OneIn | None = None
) -> list[Reading]:
    """Per call: of the server, which the goal is about, of Redis, and of both."""
    per_call = MS_PER_S / calls
    return [
        Reading(Metric(f"server CPU, {where}", "ms", goal), spent.server * per_call),
        Reading(Metric(f"Redis CPU, {where}", "ms"), spent.redis * per_call),
        Reading(Metric(f"CPU with Redis, {where}", "ms"), spent.total * per_call),
    ]
