"""What `appendfsync always` costs run-api beside `everysec`: both in turn, compared by turn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Literal

import structlog

from benchmarks.run_api_bench import load
from benchmarks.run_api_bench.connection import Connection
from benchmarks.run_api_bench.metrics import Metric, Reading, Spread
from benchmarks.run_api_bench.report import spread_text, table
from benchmarks.run_api_bench.scenario import MS_PER_S
from benchmarks.run_api_bench.settings import Sizes
from benchmarks.run_api_bench.systems import RunningServer, System, start_run_api
from benchmarks.run_api_bench.workload import Workload

SECTION = "appendfsync"
Policy = Literal["everysec", "always"]
_POLICIES: tuple[Policy, ...] = ("everysec", "always")
_HEAD = ("", "unit", *_POLICIES, "always over everysec, by turn")
_ONE_BY_ONE = 64
_BATCHES = 8
_log = structlog.get_logger()

Turn = dict[Policy, list[Reading]]


def measure(sizes: Sizes, turns: int) -> list[Turn]:
    """Each policy once in every turn, the other way around in every second one."""
    workload = Workload(sizes)
    measured: list[Turn] = []
    for number in range(turns):
        turn: Turn = {}
        for policy in _POLICIES[:: -1 if number % 2 else 1]:
            _log.info("measuring", turn=number + 1, appendfsync=policy)
            with System("run-api", partial(start_run_api, appendfsync=policy)).running() as server:
                turn[policy] = _measure(server, workload, sizes)
        measured.append(turn)
    return measured


def _measure(server: RunningServer, workload: Workload, sizes: Sizes) -> list[Reading]:
    bodies, count = workload.full_size, sizes.submissions
    load.start_run(server)
    load.submit(server.port, bodies, sizes.distinct_groups)  # what only the first requests cost
    before = server.cpu()
    report = load.submit(server.port, bodies, count)
    spent = server.cpu() - before
    with Connection(server.port) as connection:
        began = time.perf_counter()
        for body in bodies[:_ONE_BY_ONE]:
            connection.post("/scored_data", body)
        alone_s = (time.perf_counter() - began) / len(bodies[:_ONE_BY_ONE])
    batches = [load.fetch_batch(server.port).seconds for _ in range(_BATCHES)]
    return [
        Reading(Metric("groups per second, 8 connections", "1/s"), report.groups_per_s),
        Reading(Metric("CPU with Redis per group", "ms"), spent.total * MS_PER_S / count),
        Reading(Metric("one group after the other", "ms"), alone_s * MS_PER_S),
        Reading(Metric("GET /batch", "ms"), Spread.of(batches).median * MS_PER_S),
    ]


def report(turns: Sequence[Turn]) -> list[str]:
    """The table: medians of all turns, and of the ratios within each."""
    rows = [list(_HEAD)]
    for at, reading in enumerate(turns[0]["always"]):
        values = {policy: [turn[policy][at].value for turn in turns] for policy in _POLICIES}
        ratios = [a / e for a, e in zip(values["always"], values["everysec"], strict=True)]
        spreads = [Spread.of(found) for found in (*values.values(), ratios)]
        rows.append([reading.metric.name, reading.metric.unit, *map(spread_text, spreads)])
    return table(rows)
