"""One HTTP connection to a server on this machine, with Python's blocking client, and a prober.

The client costs the load generator a fraction of what the servers' work costs, so that two cores
suffice.
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from multiprocessing.connection import Connection as Pipe
from typing import Any

from grpo_core.closing import ClosesOnExit
from grpo_core.errors import GrpoError

HOST = "127.0.0.1"
ANSWER_DEADLINE_S = 180.0
_SHOWN_BYTES = 300
_PROBE_PERIOD_S = 0.005
# Forked: a new interpreter would import this again for a second, and no thread runs here.
_FORKED = multiprocessing.get_context("fork")


class ApiBenchmarkFailed(GrpoError):
    """A server did not do what is measured, so that the number would be meaningless."""


@dataclass(frozen=True)
class Body:
    """A request body with the headers that describe it."""

    content: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True)
class ApiAnswer:
    """`seconds`: from the first byte sent to the last byte read. `content`: as it was sent."""

    status: int
    is_gzip: bool
    content: bytes
    seconds: float

    def text(self) -> bytes:
        return gzip.decompress(self.content) if self.is_gzip else self.content

    def json(self) -> Any:
        return json.loads(self.text())


class Connection(ClosesOnExit):
    """Kept alive from one call to the next, if the server does so too.

    Raises:
        ApiBenchmarkFailed: no answer within `deadline_s`; `get`, `post`, `send_json`: an answer
            with another status than 200.
    """

    def __init__(self, port: int, deadline_s: float = ANSWER_DEADLINE_S) -> None:
        self._http = HTTPConnection(HOST, port, timeout=deadline_s)

    def close(self) -> None:
        self._http.close()

    def call(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> ApiAnswer:
        """One request; answers of every status are returned."""
        began = time.perf_counter()
        try:
            # a server may refuse a body before it has read all of it
            with suppress(BrokenPipeError):
                self._http.request(method, path, content, headers or {})
            response = self._http.getresponse()
            received = response.read()
        except (OSError, HTTPException) as error:
            raise ApiBenchmarkFailed(f"{method} {path}: {error!r}") from error
        seconds = time.perf_counter() - began
        is_gzip = response.headers.get("Content-Encoding") == "gzip"
        return ApiAnswer(response.status, is_gzip, received, seconds)

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> ApiAnswer:
        return _succeeded("GET", path, self.call("GET", path, headers=headers))

    def post(self, path: str, body: Body) -> ApiAnswer:
        return _succeeded("POST", path, self.call("POST", path, body.content, body.headers))

    def send_json(self, method: str, path: str, record: Mapping[str, object]) -> ApiAnswer:
        headers = {"Content-Type": "application/json"}
        answer = self.call(method, path, json.dumps(record).encode(), headers)
        return _succeeded(method, path, answer)


def _succeeded(method: str, path: str, answer: ApiAnswer) -> ApiAnswer:
    if answer.status != HTTPStatus.OK:
        raise ApiBenchmarkFailed(
            f"{method} {path}: status {answer.status}, {answer.text()[:_SHOWN_BYTES]!r}"
        )
    return answer


@dataclass(frozen=True)
class ProbeReport:
    """`longest_delay_s`: how late the prober woke up; as much of an answer's time may be the
    machine's."""

    longest_answer_s: float
    longest_delay_s: float


class Prober(ClosesOnExit):
    """Asks a server for its status every 5 ms, from a process of its own, until `report`.

    Raises:
        EOFError: the server did not answer; the error of the process is on standard error.
    """

    def __init__(self, port: int) -> None:
        self._pipe, child_end = _FORKED.Pipe()
        self._process = _FORKED.Process(target=_probe, args=(port, child_end), daemon=True)
        self._process.start()
        child_end.close()
        self._pipe.recv()

    def report(self) -> ProbeReport:
        self._pipe.send(None)
        report: ProbeReport = self._pipe.recv()
        return report

    def close(self) -> None:
        self._process.terminate()
        self._process.join()
        self._pipe.close()


def _probe(port: int, pipe: Pipe) -> None:
    longest_answer_s, longest_delay_s = 0.0, 0.0
    with Connection(port) as connection:
        connection.get("/status")
        pipe.send(None)
        due = time.perf_counter()
        while not pipe.poll():
            due = max(due + _PROBE_PERIOD_S, time.perf_counter())
            time.sleep(max(0.0, due - time.perf_counter()))
            longest_delay_s = max(longest_delay_s, time.perf_counter() - due)
            longest_answer_s = max(longest_answer_s, connection.get("/status").seconds)
    pipe.send(ProbeReport(longest_answer_s, longest_delay_s))
