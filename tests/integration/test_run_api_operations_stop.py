"""A run-api that is told to stop finishes what it has begun, and holds nobody."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from grpo_api.app import create_app
from grpo_api.lifetime import Lifetime
from grpo_api.redis_link import RedisLink
from grpo_api.settings import RunApiSettings
from grpo_api.store import RunStore
from tests.fixtures.run_api import RunningApi, start_run_api
from tests.integration.run_api_calls import group, start

LARGE = "x" * 2 * 1024 * 1024
"""Makes a group one that is not decoded in the server's own process."""
SOON_S = 40.0
"""For each step; below all that would otherwise be waited for."""
POLL_S = 60
GRACE_S = 240
BODY_DEADLINE_S = 600


@pytest.fixture
def api(redis_url: str, tmp_path: Path) -> Iterator[RunningApi]:
    with running_api(redis_url, tmp_path, GRACE_S) as running:
        yield running


@contextmanager
def running_api(redis_url: str, directory: Path, grace_s: int) -> Iterator[RunningApi]:
    further = {"--stop-grace-s": grace_s, "--body-deadline-s": BODY_DEADLINE_S}
    running = start_run_api(redis_url, directory, run_id=directory.name, further=further)
    try:
        yield running
    finally:
        running.process.kill()


def connect(api: RunningApi) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(api.url.removeprefix("http://"), timeout=2 * POLL_S)


class HalfSent:
    """A submission of which the server has the headers and half of the body."""

    def __init__(self, api: RunningApi, **changes: Any) -> None:
        body = json.dumps(group(1, **changes)).encode()
        self._rest = body[len(body) // 2 :]
        self._connection = connect(api)
        self._connection.putrequest("POST", "/scored_data")
        self._connection.putheader("Content-Length", str(len(body)))
        self._connection.endheaders(body[: len(body) // 2])

    def finish(self) -> http.client.HTTPResponse:
        self._connection.send(self._rest)
        return self.answer()

    def answer(self) -> http.client.HTTPResponse:
        return self._connection.getresponse()

    def close(self) -> None:
        self._connection.close()


def wait_for_arrival(api: RunningApi) -> None:
    """Returns once the server has what was sent to it: it answers a connection made later."""
    httpx.get(f"{api.url}/healthz", timeout=2 * POLL_S).raise_for_status()


def is_stopping(api: RunningApi) -> bool:
    return "stopping" in api.process.log_path.read_text()


def refuses_connections(api: RunningApi) -> bool:
    address = httpx.URL(api.url)
    with socket.socket() as probe:
        return probe.connect_ex((address.host, address.port or 0)) != 0


def test_what_is_under_way_is_answered_and_what_is_held_is_let_go(api: RunningApi) -> None:
    with httpx.Client(base_url=api.url, timeout=2 * POLL_S) as client:
        start(client)
    submission, poll = HalfSent(api), connect(api)
    poll.request("GET", f"/batch?wait_s={POLL_S}")
    wait_for_arrival(api)
    told = time.monotonic()
    api.process.signal(signal.SIGTERM)
    held = poll.getresponse()
    assert time.monotonic() - told < SOON_S
    assert (held.status, json.load(held)) == (200, {"batch": None})
    poll.close()
    api.process.wait_until(lambda: refuses_connections(api), SOON_S)
    time.sleep(0.5)  # a slow sender: uvicorn takes 0.1 s to count who is left
    answer = submission.finish()
    assert (answer.status, json.load(answer)) == (200, {"status": "received"})
    assert answer.headers["connection"] == "close"
    submission.close()
    assert api.process.wait(SOON_S) == 0


def test_what_is_left_when_the_grace_has_passed_is_answered_503(
    redis_url: str, tmp_path: Path
) -> None:
    with running_api(redis_url, tmp_path, 1) as api:
        submission = HalfSent(api)
        wait_for_arrival(api)
        api.process.signal(signal.SIGTERM)
        answer = submission.answer()
        assert answer.status == 503
        assert "shutting down" in json.load(answer)["detail"]
        assert int(answer.headers["retry-after"]) >= 1
        submission.close()
        assert api.process.wait(SOON_S) == 0
        assert "grace_s=1 " in api.process.log_path.read_text()


def test_a_second_signal_ends_it_at_once(api: RunningApi) -> None:
    with httpx.Client(base_url=api.url, timeout=2 * POLL_S) as client:
        start(client)
    submission = HalfSent(api)
    wait_for_arrival(api)
    api.process.signal(signal.SIGINT)
    api.process.wait_until(lambda: is_stopping(api) and refuses_connections(api), SOON_S)
    assert api.process.exit_code is None
    api.process.signal(signal.SIGTERM)
    assert api.process.wait(SOON_S) == -signal.SIGTERM
    submission.close()


def test_ctrl_c_in_a_terminal_spares_a_large_submission_that_is_under_way(api: RunningApi) -> None:
    """It reaches every process of the group, the one that decodes large submissions too."""
    with httpx.Client(base_url=api.url, timeout=2 * POLL_S) as client:
        start(client)
        client.post("/scored_data", json=group(1, images=LARGE)).raise_for_status()
    submission = HalfSent(api, images=LARGE)
    wait_for_arrival(api)
    os.killpg(api.process.pid, signal.SIGINT)
    api.process.wait_until(lambda: refuses_connections(api), SOON_S)
    answer = submission.finish()
    assert (answer.status, json.load(answer)) == (200, {"status": "received"})
    submission.close()
    assert api.process.wait(SOON_S) == 0


async def test_a_server_that_stops_is_alive_and_not_ready(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_api.redis_link._PING_DEADLINE_S", SOON_S)
    settings = RunApiSettings(redis_url=redis_url, run_id="stopping", redis_deadline_s=SOON_S)
    link = RedisLink(settings.redis_url, settings.run_id, settings.redis_deadline_s)
    store = RunStore(link, settings.environment_timeout_s, settings.max_leased_bytes)
    lifetime = Lifetime()
    transport = httpx.ASGITransport(create_app(store, settings, lifetime))
    async with httpx.AsyncClient(transport=transport, base_url="http://run-api") as client:
        assert (await client.get("/readyz")).status_code == 200
        lifetime.closing.set()
        answer = await client.get("/readyz")
        assert (await client.get("/healthz")).status_code == 200
    await store.close()
    assert answer.status_code == 503
    assert "shutting down" in answer.json()["detail"]
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["connection"] == "close"
