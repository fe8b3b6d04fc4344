"""Asks a server for its status every 5 ms, from a process of its own, while others load it."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe

from benchmarks.run_api_bench.connection import ANSWER_DEADLINE_S, Connection
from benchmarks.run_api_bench.errors import ApiBenchmarkFailed
from grpo_core.closing import ClosesOnExit

PERIOD_S = 0.005
_READY = "ready"
_STOP = "stop"
_END_DEADLINE_S = 5.0

# Forked: a fresh interpreter would take a second to import this again, and no thread runs here.
_PROCESSES = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class ProbeReport:
    answers: int
    longest_answer_s: float
    longest_delay_s: float
    """How late the prober itself woke up: as much of an answer's time may be the machine's."""


class Prober(ClosesOnExit):
    """Probes from when it is made until `report`.

    Raises:
        BenchmarkFailed: the server did not answer it, in 180 s or at all.
    """

    def __init__(self, port: int) -> None:
        self._pipe, child_end = _PROCESSES.Pipe()
        self._process = _PROCESSES.Process(target=_probe, args=(port, child_end), daemon=True)
        self._process.start()
        child_end.close()
        try:
            self._receive()
        except BaseException:
            self.close()
            raise

    def report(self) -> ProbeReport:
        """Stop, once the answer that is awaited has come."""
        self._pipe.send(_STOP)
        report = self._receive()
        assert isinstance(report, ProbeReport)
        return report

    def close(self) -> None:
        self._process.terminate()
        self._process.join(_END_DEADLINE_S)
        self._pipe.close()

    def _receive(self) -> object:
        try:
            if self._pipe.poll(ANSWER_DEADLINE_S + _END_DEADLINE_S):
                received: object = self._pipe.recv()
                return received
        except EOFError as error:
            raise ApiBenchmarkFailed("GET /status: the prober ended; its error is above") from error
        raise ApiBenchmarkFailed(
            f"GET /status: the prober said nothing for {ANSWER_DEADLINE_S:g} s"
        )


def _probe(port: int, pipe: Pipe) -> None:
    answers, longest_answer_s, longest_delay_s = 0, 0.0, 0.0
    with Connection(port) as connection:
        connection.get("/status")
        pipe.send(_READY)
        due = time.perf_counter()
        while not pipe.poll():
            due = max(due + PERIOD_S, time.perf_counter())
            time.sleep(max(0.0, due - time.perf_counter()))
            longest_delay_s = max(longest_delay_s, time.perf_counter() - due)
            longest_answer_s = max(longest_answer_s, connection.get("/status").seconds)
            answers += 1
    pipe.send(ProbeReport(answers, longest_answer_s, longest_delay_s))
