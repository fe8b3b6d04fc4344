"""run-api beside the API server of atroposlib 0.4.0: `python -m benchmarks.run_api`.

Both run alone, one after the other, on this machine. Runs are interleaved, so that other work of
the machine affects both.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from importlib.metadata import requires, version
from pathlib import Path
from statistics import median, quantiles
from typing import ClassVar, Literal, get_args

import structlog
from pydantic import Field

from benchmarks.report import host_facts, publish, spread, table, today, verdict
from benchmarks.run_api_bench import load
from benchmarks.run_api_bench.connection import HOST, ApiBenchmarkFailed, Body, Connection, Prober
from benchmarks.run_api_bench.load import FULL, QUICK, Sizes, Workload
from benchmarks.run_api_bench.servers import (
    ATROPOSLIB_PINS,
    CpuSeconds,
    RunningServer,
    SystemName,
    core_wait_seconds,
    running,
)
from grpo_core.logs import configure_logging
from grpo_core.redis.server import redis_binary
from grpo_core.settings import Command, CommandSettings, load_settings

SECTION = "run-api"
ScenarioName = Literal["submissions", "crowd", "first-batch", "stalls"]
MS_PER_S = 1e3
ENVIRONMENTS = 64
_TURNS = 4
_SLOW_BODY_BYTES = 1_000_000
_SLOW_PIECE, _SLOW_PAUSE_S = b" " * 64, 0.05
_AFTERMATH_S = 0.1
"""The work after an answer, such as freeing memory, may stall others too."""
_SERVING = ("starlette", "pydantic-core", "uvloop", "httptools")
"""Packages that run-api uses beside its declared requirements."""
_log = structlog.get_logger()


class RunApiBenchSettings(CommandSettings):
    """Measure run-api and the API server of atroposlib 0.4.0 under the same load, one after the
    other."""

    command: ClassVar[Command] = Command(prog="bench-run-api")

    runs: int = Field(3, ge=1, description="Times that everything is measured")
    quick: bool = Field(False, description="One run of small sizes; writes no results")
    scenarios: list[ScenarioName] = Field(
        list(get_args(ScenarioName)), min_length=1, description="What to measure; results need all"
    )
    results: Path | None = Field(None, description="Markdown file whose section is replaced")


@dataclass(frozen=True)
class Goal:
    """The highest value of run-api or, if `is_ratio`, of its value over atroposlib's."""

    bound: float
    is_ratio: bool = False

    def __str__(self) -> str:
        return f"ratio at most 1/{1 / self.bound:g}" if self.is_ratio else f"at most {self.bound:g}"


@dataclass(frozen=True)
class Metric:
    name: str
    unit: str
    goal: Goal | None = None


Readings = dict[Metric, float]


@dataclass(frozen=True)
class Rig:
    """The means of a scenario. Each scenario starts its server and stops it."""

    system: SystemName
    sizes: Sizes
    workload: Workload


def cpu_readings(spent: CpuSeconds, calls: int, where: str, goal: Goal | None = None) -> Readings:
    """Per call: of the server, which has the goal, of Redis, and of both."""
    per_call = MS_PER_S / calls
    return {
        Metric(f"server CPU, {where}", "ms", goal): spent.server * per_call,
        Metric(f"Redis CPU, {where}", "ms"): spent.redis * per_call,
        Metric(f"CPU with Redis, {where}", "ms"): spent.total * per_call,
    }


def submissions(rig: Rig) -> Readings:
    """CPU time per group and groups per second: full-size groups with log-probabilities, gzip, one
    per request, over 8 connections, into a queue that already holds that many tiny groups (8 x 4
    tokens)."""
    readings: Readings = {}
    count, bodies = rig.sizes.submissions, rig.workload.full_size
    with running(rig.system) as server:
        load.start_run(server)
        load.submit(server.port, bodies, rig.sizes.distinct_groups)  # warms up
        for depth in rig.sizes.depths:
            load.start_run(server)
            load.fill(server.port, depth)
            where, before = f"depth {depth:,}", server.cpu()
            report = load.submit(server.port, bodies, count)
            readings |= cpu_readings(server.cpu() - before, count, where, Goal(1 / 4, True))
            generator_ms = report.generator_cpu_s * MS_PER_S / count
            readings[Metric(f"load generator CPU, {where}", "ms")] = generator_ms
            readings[Metric(f"groups per second, {where}", "1/s")] = report.groups_per_s
    return readings


def crowd(rig: Rig) -> Readings:
    """64 environments over 512 connections at once, each with one request in flight, on a queue of
    10,000 tiny groups: a full-size group, then a poll of /status-env, four times. One more client
    sends its body at a kilobyte per second all the time."""
    sizes, bodies = rig.sizes, rig.workload.full_size
    with running(rig.system) as server:
        load.start_run(server, environments=ENVIRONMENTS)
        load.submit(server.port, bodies, sizes.distinct_groups)
        load.start_run(server, environments=ENVIRONMENTS)
        load.fill(server.port, sizes.depths[-1], range(ENVIRONMENTS))
        before, began = server.cpu(), time.perf_counter()
        with _slow_client(server.port), ThreadPoolExecutor(sizes.in_flight) as members:
            every = threading.Barrier(sizes.in_flight)
            member = partial(_member, server.port, bodies, every)
            pairs = [
                pair for found in members.map(member, range(sizes.in_flight)) for pair in found
            ]
        seconds, spent = time.perf_counter() - began, server.cpu() - before
        memory = server.rss_bytes()
    sent_ms, polled_ms = ([s * MS_PER_S for s in column] for column in zip(*pairs, strict=True))
    return {
        Metric("groups per second", "1/s"): len(pairs) / seconds,
        **cpu_readings(spent, len(pairs), "each group with its poll", Goal(1 / 5, True)),
        Metric("p50 of a submission", "ms"): median(sent_ms),
        Metric("p99 of a submission", "ms"): quantiles(sent_ms, n=100)[-1],
        Metric("p99 of /status-env", "ms", Goal(1_000)): quantiles(polled_ms, n=100)[-1],
        Metric("memory at the end", "MiB"): memory / 2**20,
    }


def _member(
    port: int, bodies: Sequence[Body], every: threading.Barrier, index: int
) -> list[tuple[float, float]]:
    """Seconds of each submission and of the poll after it, over one connection."""
    found = []
    with Connection(port) as connection:
        every.wait()
        for turn in range(_TURNS):
            body = bodies[(_TURNS * index + turn) % len(bodies)]
            sent = connection.post("/scored_data", body)
            asked = {"env_id": index % ENVIRONMENTS}
            found.append((sent.seconds, connection.send_json("GET", "/status-env", asked).seconds))
    return found


@contextmanager
def _slow_client(port: int) -> Iterator[None]:
    """Sends the beginning of a long body, a few bytes at a time."""
    over = threading.Event()

    def dribble() -> None:
        with socket.create_connection((HOST, port)) as connection:
            connection.sendall(
                b"POST /scored_data HTTP/1.1\r\nHost: benchmark\r\n"
                b"Content-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % _SLOW_BODY_BYTES
            )
            while not over.wait(_SLOW_PAUSE_S):
                connection.sendall(_SLOW_PIECE)

    thread = threading.Thread(target=dribble)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def first_batch(rig: Rig) -> Readings:
    """A batch of 64 sequences from a queue that holds that many groups: wall time until the whole
    answer is read, gzip-encoded as the `requests` library asks for it, and the CPU time of the
    server and Redis meanwhile."""
    one_batch = load.BATCH_SEQUENCES // load.GROUP_SIZE
    readings: Readings = {}
    with running(rig.system) as server:
        for depth in (one_batch, *rig.sizes.depths[1:]):
            load.start_run(server)
            load.fill(server.port, depth)
            readings |= _fetch(server, f"{depth:,} tiny groups", is_deep=depth == FULL.depths[-1])
        load.start_run(server)
        load.submit(server.port, rig.workload.full_size, one_batch)
        readings |= _fetch(server, f"{one_batch} full-size groups")
    return readings


def _fetch(server: RunningServer, queued: str, is_deep: bool = False) -> Readings:
    before = server.cpu()
    seconds = load.fetch_batch(server.port).seconds
    spent_s = (server.cpu() - before).total
    goal = Goal(1 / 50, True) if is_deep else None
    return {
        Metric(f"GET /batch, {queued}", "ms", goal): seconds * MS_PER_S,
        Metric(f"CPU with Redis, {queued}", "ms"): spent_s * MS_PER_S,
    }


def stalls(rig: Rig) -> Readings:
    """A prober asks for /status every 5 ms over a connection of its own, while another client sends
    one awkward request. Its longest answer counts. Two rows show how much of it may come from the
    machine: the latest wake-up of the prober, and how long in all the server's main thread had work
    and no core."""
    sizes, workload = rig.sizes, rig.workload
    large = f"{sizes.large_body_bytes // 10**6} MB body"
    deep, many = sizes.depths[-1], sizes.long_list_groups
    sequences, long_list = sizes.large_batch_sequences, load.tiny_groups(many)
    with running(rig.system) as server:
        port, during = server.port, partial(_probe_during, server)
        load.start_run(server, sequences)
        readings = {
            **during("nothing", partial(time.sleep, sizes.idle_s), goal=None),
            **during(f"an invalid {large}", partial(_refused, port, workload.large_invalid)),
            **during("a gzip bomb", partial(_refused, port, workload.bomb)),
            **during(f"a valid {large}", partial(_taken, port, workload.large_valid)),
        }
        _taken(port, workload.large_valid)  # two of these bodies fill one such batch
        fetch = partial(load.fetch_batch, port, sequences)
        readings |= during(f"GET /batch of {sequences:,} sequences", fetch)
        load.start_run(server)
        load.fill(port, deep)
        fetch = partial(load.fetch_batch, port)
        readings |= during(f"GET /batch from {deep:,} tiny groups", fetch)
        readings |= during(f"a list of {many:,} tiny groups", partial(_taken, port, long_list))
    return readings


def _probe_during(
    server: RunningServer,
    what: str,
    request: Callable[[], object],
    goal: Goal | None = Goal(50.0),
) -> Readings:
    with Prober(server.port) as prober:
        before_s = core_wait_seconds(server.process.pid)
        request()
        time.sleep(_AFTERMATH_S)
        report = prober.report()
        waited_s = core_wait_seconds(server.process.pid) - before_s
    return {
        Metric(f"longest /status during {what}", "ms", goal): report.longest_answer_s * MS_PER_S,
        Metric(f"- prober's longest delay, {what}", "ms"): report.longest_delay_s * MS_PER_S,
        Metric(f"- server without a core, {what}", "ms"): waited_s * MS_PER_S,
    }


def _taken(port: int, body: Body) -> None:
    with Connection(port) as connection:
        connection.post("/scored_data_list", body)


def _refused(port: int, body: Body) -> None:
    with Connection(port) as connection:
        answer = connection.call("POST", "/scored_data_list", body.content, body.headers)
    if not HTTPStatus.BAD_REQUEST <= answer.status < HTTPStatus.INTERNAL_SERVER_ERROR:
        raise ApiBenchmarkFailed(f"POST /scored_data_list: status {answer.status}, expected a 4xx")


SCENARIOS: dict[ScenarioName, tuple[str, Callable[[Rig], Readings]]] = {
    "submissions": ("Submitting groups", submissions),
    "crowd": ("Many environments at once", crowd),
    "first-batch": ("First GET /batch", first_batch),
    "stalls": ("Stalls", stalls),
}


def main() -> None:
    settings = load_settings(RunApiBenchSettings, sys.argv[1:])
    configure_logging("bench-run-api")
    runs = 1 if settings.quick else settings.runs
    sizes = QUICK if settings.quick else FULL
    lines = [*_introduction(runs)]
    found = measure(settings.scenarios, sizes, runs)
    for name, rows in found.items():
        title, scenario = SCENARIOS[name]
        explanation = " ".join((scenario.__doc__ or "").split())
        head = ["", "unit", *get_args(SystemName), "ratio", "goal"]
        cells = [head, *(_row(metric, values) for metric, values in rows.items())]
        lines += ["", f"### {title}", "", explanation, "", *table(cells)]
    is_complete = not settings.quick and len(found) == len(SCENARIOS)
    publish(SECTION, lines, settings.results if is_complete else None)


Rows = dict[Metric, dict[SystemName, list[float]]]


def measure(names: Sequence[ScenarioName], sizes: Sizes, runs: int) -> dict[ScenarioName, Rows]:
    """Every scenario on both systems, in turns."""
    workload = Workload(sizes)
    found: dict[ScenarioName, Rows] = {name: {} for name in names}
    for run in range(1, runs + 1):
        for name, rows in found.items():
            for system in get_args(SystemName):
                _log.info("measuring", run=run, scenario=name, system=system)
                readings = SCENARIOS[name][1](Rig(system, sizes, workload))
                for metric, value in readings.items():
                    rows.setdefault(metric, {}).setdefault(system, []).append(value)
    return found


def _row(metric: Metric, found: Mapping[SystemName, Sequence[float]]) -> list[str]:
    theirs, ours = found["atroposlib"], found["run-api"]
    ratio, goal = "-", ""
    if median(theirs) > 0 and median(ours) > 0:
        over = median(ours) / median(theirs)
        ratio = f"{over:.1f}" if over >= 1 else f"1/{1 / over:.1f}"
    if metric.goal:
        bound = metric.goal.bound * (median(theirs) if metric.goal.is_ratio else 1)
        goal = f"{metric.goal}: {verdict(median(ours) <= bound)}"
    return [metric.name, metric.unit, spread(theirs), spread(ours), ratio, goal]


def _introduction(runs: int) -> list[str]:
    counted = "one run" if runs == 1 else f"{runs} runs: median (lowest to highest)"
    pins = dict(x.split("==") for x in ATROPOSLIB_PINS.read_text().splitlines() if "==" in x)
    shown = ("atroposlib", "fastapi", "uvicorn", "pydantic", *_SERVING)
    required = [re.split(r"[^\w.-]", line)[0] for line in requires("grpo-run-api") or []]
    ours = dict.fromkeys([*required, "pydantic", *_SERVING])
    redis = subprocess.run(
        [redis_binary(), "--version"], capture_output=True, text=True, check=True
    )
    return [
        f"`make bench-run-api` on {today()}, {counted}. Both servers ran alone, one after the "
        "other, with one process that sends and one that probes beside them. A full-size group "
        "has 8 x 1024 tokens. *ratio* is run-api over atroposlib.",
        "",
        *host_facts(
            f"Redis {redis.stdout.split('v=')[1].split()[0]} (appendonly yes, appendfsync always)",
            "atroposlib: " + ", ".join(f"{name} {pins[name]}" for name in shown),
            "run-api: " + ", ".join(f"{n} {version(n)}" for n in ours if not n.startswith("grpo-")),
        ),
    ]


if __name__ == "__main__":
    main()
