"""After SIGTERM run-api finishes requests in flight, and ends waiting ones early."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx

from tests.fixtures.run_api import RunningApi, start_run_api
from tests.integration.run_api_calls import ApiClient, group
from tests.support.wait import DEADLINE_S

LARGE = "x" * 2 * 1024 * 1024
"""Makes a group so large that the decoder process decodes it."""
POLL_S = 60
GRACE_S = 50
"""Shorter than the poll, so a poll that does not end early would get 503."""
BODY_DEADLINE_S = 600


@contextmanager
def running_api(
    redis_url: str, directory: Path, grace_s: int = GRACE_S
) -> Iterator[tuple[RunningApi, ApiClient]]:
    """A run-api with a trainer, killed after the test."""
    further = {"--stop-grace-s": grace_s, "--body-deadline-s": BODY_DEADLINE_S}
    running = start_run_api(redis_url, directory, run_id=directory.name, further=further)
    try:
        with ApiClient(base_url=running.url, timeout=DEADLINE_S) as client:
            client.start()
            yield running, client
    finally:
        running.process.kill()


def connect(api: RunningApi) -> HTTPConnection:
    return HTTPConnection(api.url.removeprefix("http://"), timeout=DEADLINE_S)


@contextmanager
def half_sent(api: RunningApi, **changes: Any) -> Iterator[tuple[HTTPConnection, bytes]]:
    """A submission with half of its body sent, and the rest of the body."""
    body = json.dumps(group(1, **changes)).encode()
    with closing(connect(api)) as connection:
        connection.putrequest("POST", "/scored_data")
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body[: len(body) // 2])
        yield connection, body[len(body) // 2 :]


def wait_for_arrival(api: RunningApi) -> None:
    """Wait until the server has received all bytes: then it answers a later connection."""
    httpx.get(f"{api.url}/healthz", timeout=DEADLINE_S).raise_for_status()


def refuses_connections(api: RunningApi) -> bool:
    address = httpx.URL(api.url)
    with socket.socket() as probe:
        return probe.connect_ex((address.host, address.port or 0)) != 0


def test_submissions_under_way_are_answered_and_polls_released(
    redis_url: str, tmp_path: Path
) -> None:
    """Ctrl-C in a terminal also reaches the decoder process."""
    with running_api(redis_url, tmp_path) as (api, client):
        client.post("/scored_data", json=group(1, images=LARGE)).raise_for_status()
        with half_sent(api, images=LARGE) as (submission, rest), closing(connect(api)) as poll:
            poll.request("GET", f"/batch?wait_s={POLL_S}")
            wait_for_arrival(api)
            os.killpg(api.process.pid, signal.SIGINT)
            released = poll.getresponse()
            assert (released.status, json.load(released)) == (200, {"batch": None})
            api.process.wait_until(lambda: refuses_connections(api), DEADLINE_S)
            submission.send(rest)
            answer = submission.getresponse()
            assert (answer.status, json.load(answer)) == (200, {"status": "received"})
            assert answer.headers["connection"] == "close"
        assert api.process.wait(DEADLINE_S) == 0


def test_submissions_left_when_the_grace_has_passed_are_answered_503(
    redis_url: str, tmp_path: Path
) -> None:
    with running_api(redis_url, tmp_path, grace_s=1) as (api, _):
        with half_sent(api) as (submission, _):
            wait_for_arrival(api)
            api.process.signal(signal.SIGTERM)
            answer = submission.getresponse()
            assert answer.status == 503
            assert "shutting down" in json.load(answer)["detail"]
            assert int(answer.headers["retry-after"]) >= 1
        assert api.process.wait(DEADLINE_S) == 0
        assert "grace_s=1 " in api.process.log_path.read_text()
