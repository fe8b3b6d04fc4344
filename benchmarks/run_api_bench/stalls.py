"""How long one awkward request keeps everybody else waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from http import HTTPStatus

from benchmarks.run_api_bench import load
from benchmarks.run_api_bench.connection import Connection
from benchmarks.run_api_bench.errors import ApiBenchmarkFailed
from benchmarks.run_api_bench.metrics import AtMost, Metric, Reading
from benchmarks.run_api_bench.prober import Prober
from benchmarks.run_api_bench.process_tree import core_wait_seconds
from benchmarks.run_api_bench.scenario import MS_PER_S, Rig, Scenario
from benchmarks.run_api_bench.systems import RunningServer
from benchmarks.run_api_bench.workload import Body

_GOAL = AtMost(50.0)
_AFTERMATH_S = 0.1
"""What a request leaves to be done, such as freeing its memory, may stall others too."""


def measure(rig: Rig) -> list[Reading]:
    sizes, workload = rig.sizes, rig.workload
    megabytes = f"{sizes.large_body_bytes // 10**6} MB body"
    with rig.system.running() as server:
        port = server.port
        load.start_run(server, sizes.large_batch_sequences)
        probed = partial(_probe_during, server)
        readings = [
            *probed("nothing", partial(time.sleep, sizes.idle_s), goal=None),
            *probed(f"an invalid {megabytes}", partial(_refused, port, workload.large_invalid)),
            *probed("a gzip bomb", partial(_refused, port, workload.bomb)),
            *probed(f"a valid {megabytes}", partial(_taken, port, workload.large_valid)),
        ]
        # the groups of two valid bodies make more than one such batch
        _taken(port, workload.large_valid)
        batch = f"GET /batch of {sizes.large_batch_sequences:,} sequences"
        readings += probed(batch, partial(load.fetch_batch, port, sizes.large_batch_sequences))
        load.start_run(server)
        load.fill(port, sizes.depths[-1])
        deep = f"GET /batch from {sizes.depths[-1]:,} tiny groups"
        readings += probed(deep, partial(load.fetch_batch, port))
        many = f"a list of {sizes.long_list_groups:,} tiny groups"
        readings += probed(many, partial(_taken, port, workload.long_list))
    return readings


def _probe_during(
    server: RunningServer, what: str, request: Callable[[], object], goal: AtMost | None = _GOAL
) -> list[Reading]:
    with Prober(server.port) as prober:
        before_s = core_wait_seconds(server.process.pid)
        request()
        time.sleep(_AFTERMATH_S)
        report = prober.report()
        waited_s = core_wait_seconds(server.process.pid) - before_s
    answer = Metric(f"longest /status during {what}", "ms", goal)
    return [
        Reading(answer, report.longest_answer_s * MS_PER_S),
        Reading(
            Metric(f"- prober's longest delay, {what}", "ms"), report.longest_delay_s * MS_PER_S
        ),
        Reading(Metric(f"- server without a core, {what}", "ms"), waited_s * MS_PER_S),
    ]


def _taken(port: int, body: Body) -> None:
    with Connection(port) as connection:
        connection.post("/scored_data_list", body)


def _refused(port: int, body: Body) -> None:
    with Connection(port) as connection:
        answer = connection.call("POST", "/scored_data_list", body.content, body.headers)
    if not HTTPStatus.BAD_REQUEST <= answer.status < HTTPStatus.INTERNAL_SERVER_ERROR:
        raise ApiBenchmarkFailed(f"POST /scored_data_list: status {answer.status}, expected a 4xx")


SCENARIO = Scenario(
    name="stalls",
    title="Stalls",
    explanation="A prober asks for /status every 5 ms over a connection of its own while another "
    "client sends one awkward request. Its longest answer counts. Two rows say how much of it may "
    "be the machine's doing: how late the prober woke up at most, and how long in all the server's "
    "main thread had work and no core.",
    measure=measure,
)
