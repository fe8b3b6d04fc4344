"""Many environments at once on a full queue, beside a client that is very slow."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from benchmarks.run_api_bench import load
from benchmarks.run_api_bench.connection import HOST, Connection
from benchmarks.run_api_bench.metrics import AtMost, Metric, OneIn, Reading
from benchmarks.run_api_bench.scenario import MS_PER_S, Rig, Scenario, cpu_readings
from benchmarks.run_api_bench.workload import Body

ENVIRONMENTS = 64
_MIB = 2**20
_GOAL = OneIn(5)
_POLL_GOAL = AtMost(1_000.0)
_SLOW_BODY_BYTES = 1_000_000
_SLOW_PIECE = b" " * 64
_SLOW_PAUSE_S = 0.05


def measure(rig: Rig) -> list[Reading]:
    sizes = rig.sizes
    with rig.system.running() as server:
        load.start_run(server, minimums=(None,) * ENVIRONMENTS)
        load.submit(server.port, rig.workload.full_size, sizes.distinct_groups)
        load.start_run(server, minimums=(None,) * ENVIRONMENTS)
        load.fill(server.port, sizes.depths[-1], env_ids=range(ENVIRONMENTS))
        before, began = server.cpu(), time.perf_counter()
        with _slow_client(server.port):
            submissions, polls = _crowd(server.port, rig.workload.full_size, sizes.in_flight)
        seconds, spent = time.perf_counter() - began, server.cpu() - before
        memory = server.rss_bytes()
    return [
        Reading(Metric("groups per second", "1/s"), len(submissions) / seconds),
        *cpu_readings(spent, len(submissions), "each group with its poll", _GOAL),
        Reading(Metric("p50 of a submission", "ms"), statistics.median(submissions) * MS_PER_S),
        Reading(Metric("p99 of a submission", "ms"), _p99(submissions) * MS_PER_S),
        Reading(Metric("p99 of /status-env", "ms", _POLL_GOAL), _p99(polls) * MS_PER_S),
        Reading(Metric("memory at the end", "MiB"), memory / _MIB),
    ]


def _crowd(port: int, bodies: Sequence[Body], in_flight: int) -> tuple[list[float], list[float]]:
    """Seconds of submissions and of polls, over `in_flight` connections at once, each with four of
    both in turn."""
    every = threading.Barrier(in_flight)

    def member(index: int) -> tuple[list[float], list[float]]:
        submissions, polls = [], []
        with Connection(port) as connection:
            every.wait()
            for turn in range(4):
                body = bodies[(4 * index + turn) % len(bodies)]
                submissions.append(connection.post("/scored_data", body).seconds)
                asked = {"env_id": index % ENVIRONMENTS}
                polls.append(connection.send_json("GET", "/status-env", asked).seconds)
        return submissions, polls

    with ThreadPoolExecutor(in_flight) as crowd:
        found = list(crowd.map(member, range(in_flight)))
    return [s for member, _ in found for s in member], [s for _, member in found for s in member]


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


def _p99(seconds: Sequence[float]) -> float:
    return statistics.quantiles(seconds, n=100)[-1]


SCENARIO = Scenario(
    name="crowd",
    title="Many environments at once",
    explanation=f"{ENVIRONMENTS} environments over 512 connections at once, each with one request "
    "in flight, on a queue of 10,000 tiny groups: a group of full size (8 x 1024 tokens), then a "
    "poll of /status-env, four times. One more client sends its body at a kilobyte per second all "
    "the time.",
    measure=measure,
)
