"""One HTTP connection to a server on this machine, by Python's own blocking client.

It costs the load generator a fraction of what the servers' work costs, so that two cores suffice.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from typing import Any

from benchmarks.run_api_bench.errors import ApiBenchmarkFailed
from benchmarks.run_api_bench.workload import Body
from grpo_core.closing import ClosesOnExit

HOST = "127.0.0.1"
ANSWER_DEADLINE_S = 180.0
_SHOWN_BYTES = 300


@dataclass(frozen=True)
class ApiAnswer:
    """`seconds` from the first byte sent to the last byte read; `content` as it was sent."""

    status: int
    is_gzip: bool
    content: bytes
    seconds: float

    def text(self) -> bytes:
        return gzip.decompress(self.content) if self.is_gzip else self.content

    def json(self) -> Any:
        return json.loads(self.text())


class Connection(ClosesOnExit):
    """Kept alive from one call to the next, as far as the server does.

    Raises:
        BenchmarkFailed: no answer within 180 s.
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
            # a server may refuse a body, and say so, before it has read all of it
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
