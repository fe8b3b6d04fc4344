"""What a poll of an environment costs, by the depth of the queue."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import quantiles

from benchmarks.run_api_bench import load
from benchmarks.run_api_bench.metrics import AtMost, Metric, Reading
from benchmarks.run_api_bench.scenario import MS_PER_S, Rig, Scenario, at_depth, cpu_readings
from benchmarks.run_api_bench.systems import CpuSeconds, RunningServer

_FLAT = AtMost(2.0)
_P50, _P99 = 49, 98
"""Indices among the 99 cuts that divide the polls into hundredths."""


@dataclass(frozen=True)
class Polls:
    """What a number of polls took, at one depth of the queue."""

    depth: int
    count: int
    p50_ms: float
    p99_ms: float
    cpu: CpuSeconds

    def readings(self) -> list[Reading]:
        where = at_depth(self.depth)
        return [
            Reading(Metric(f"p50, {where}", "ms"), self.p50_ms),
            Reading(Metric(f"p99, {where}", "ms"), self.p99_ms),
            *cpu_readings(self.cpu, self.count, where),
        ]


def measure(rig: Rig) -> list[Reading]:
    with rig.system.running() as server:
        _poll(server, rig.sizes.polls, 0)  # what only the first requests cost
        polls = [_poll(server, rig.sizes.polls, depth) for depth in rig.sizes.depths]
    shallow, deep = polls[0], polls[-1]
    over = f"{at_depth(deep.depth)} over {at_depth(shallow.depth)}"
    return [
        Reading(Metric(f"p99, {over}", "ratio", _FLAT), deep.p99_ms / shallow.p99_ms),
        Reading(
            Metric(f"CPU with Redis, {over}", "ratio", _FLAT), deep.cpu.total / shallow.cpu.total
        ),
        *(reading for poll in polls for reading in poll.readings()),
    ]


def _poll(server: RunningServer, count: int, depth: int) -> Polls:
    load.start_run(server)
    load.fill(server.port, depth)
    before = server.cpu()
    seconds = load.poll_status_env(server.port, count)
    spent = server.cpu() - before
    cuts = quantiles(seconds, n=100, method="inclusive")
    return Polls(depth, count, cuts[_P50] * MS_PER_S, cuts[_P99] * MS_PER_S, spent)


SCENARIO = Scenario(
    name="status-env",
    title="Polling /status-env",
    explanation="One poll after the other over one connection, with that many tiny groups queued: "
    "what the environment waits, and CPU time per poll.",
    measure=measure,
)
