"""Logging, tokens, `/metrics`, and the end after a stop signal."""

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
import pytest
import redis

from grpo_api.store.redis import layout_prefix
from grpo_core.clients.run_api import TrainerClient
from grpo_core.errors import RequestRefused
from tests.fixtures.run_api import RunningApi, start_run_api
from tests.integration.conftest import StartApi
from tests.integration.run_api_calls import REGISTRATION, ApiClient, group
from tests.support.wait import DEADLINE_S, wait_for

TOKEN = "correct-horse-battery-staple"
AUTHORIZATION = {"Authorization": f"Bearer {TOKEN}"}
OPEN = ("/health", "/healthz", "/readyz")
RUN_ID = "operations"


@pytest.fixture(scope="module")
def api(own_api: StartApi) -> RunningApi:
    return own_api(RUN_ID, environment={"RUN_API_TOKEN": TOKEN})


@pytest.fixture(scope="module")
def stranger(api: RunningApi) -> Iterator[ApiClient]:
    """A client without the token."""
    with ApiClient(base_url=api.url, timeout=DEADLINE_S) as client:
        yield client


@pytest.fixture
def client(api: RunningApi) -> Iterator[ApiClient]:
    """A client with the token, of a run without a trainer."""
    with ApiClient(base_url=api.url, timeout=DEADLINE_S, headers=AUTHORIZATION) as known:
        known.get("/reset_data").raise_for_status()
        yield known


def test_a_defect_is_a_500_whose_traceback_is_found_by_the_id(
    api: RunningApi, client: ApiClient, redis_url: str
) -> None:
    with redis.Redis.from_url(redis_url) as connection:
        connection.set(f"{layout_prefix(RUN_ID)}trainer", "not a hash")
        answer = client.get("/info", headers={"X-Request-Id": "defect-1"})
        connection.delete(f"{layout_prefix(RUN_ID)}trainer")
    assert answer.status_code == 500
    assert answer.json()["request_id"] == answer.headers["x-request-id"] == "defect-1"

    def traceback() -> str:
        log = api.process.log_path.read_text()
        return log.partition("request_id=defect-1")[2]

    assert "Traceback" in wait_for(traceback, lambda text: "WRONGTYPE" in text)


def test_without_the_token_every_route_but_probes_is_401_and_changes_nothing(
    api: RunningApi, stranger: ApiClient, client: ApiClient
) -> None:
    documented = client.get("/openapi.json").json()["paths"].items()
    routes = [(method, path) for path, methods in documented for method in methods]
    assert len(routes) > 15
    for method, path in [*routes, ("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/none")]:
        answer = stranger.request(method, path.replace("{batch_id}", "1"))
        if path in OPEN:
            assert stranger.probe(path).status_code == 200
        else:
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.headers["x-request-id"]
            assert "Authorization: Bearer" in answer.json()["detail"]
    assert stranger.register().status_code == 401
    assert client.get("/info").json()["batch_size"] == -1
    with TrainerClient(api.url, token=TOKEN) as known, TrainerClient(api.url) as unknown:
        known.status()
        with pytest.raises(RequestRefused, match="Authorization: Bearer"):
            unknown.status()
    log = api.process.log_path.read_text()
    assert "access_token_required=True" in log
    assert TOKEN not in log


def assert_facts(http: ApiClient, **expected: float) -> None:
    facts = http.run_facts()
    assert {name: facts[name] for name in expected} == expected


def test_requests_are_counted_by_route_and_status(http: ApiClient) -> None:
    before = http.scrape()
    for path in ("/status", "/status", "/nowhere/1", "/nowhere/2"):
        http.get(path)
    for batch_id in (7, 8):
        http.post(f"/batch/{batch_id}/ack")
    after = http.scrape()
    for labels in ("GET//status/200", "GET/unmatched/404", "POST//batch/{batch_id}/ack/422"):
        name = f"run_api_requests_total/{labels}"
        assert after[name] - before.get(name, 0) == 2
    assert "nowhere" not in str(after.keys())


def test_the_queue_and_what_waits_beside_it(http: ApiClient) -> None:
    empty = ("queued_groups", "queued_bytes", "leased_batches", "environments_alive", "step")
    ages = ("oldest_queued_group_age_seconds", "oldest_lease_age_seconds")
    assert_facts(http, **dict.fromkeys((*empty, *ages), 0.0))
    http.start(starting_step=5)
    env_id = http.register_environment()["env_id"]
    http.register_environment()
    http.submit(1)
    assert http.run_facts()["queued_bytes"] > 50
    http.submit(2, size=4)
    http.send_group(3, size=1, env_id=env_id)
    assert http.run_facts()["buffered_bytes"] > 30
    wait_for(lambda: http.run_facts()[ages[0]])
    assert_facts(http, queued_groups=2, queued_sequences=6, buffered_parts=1, step=5)
    assert_facts(http, environments_registered=2, environments_alive=2)
    http.disconnect(env_id)
    assert_facts(http, environments_alive=1, buffered_parts=0, buffered_bytes=0)


def test_leases_until_they_are_acknowledged(http: ApiClient) -> None:
    http.start()
    http.submit(1, 2, 3, 4)
    queued_bytes = http.run_facts()["queued_bytes"]
    trainer = http.post("/register", json=REGISTRATION).json()["uuid"]
    assert [http.lease(trainer, after).json()["batch_id"] for after in (0, 1)] == [1, 2]
    assert_facts(http, step=2, batches_delivered_total=2, leased_batches=2)
    assert_facts(http, queued_groups=0, queued_bytes=0, leased_bytes=queued_bytes)
    wait_for(lambda: http.run_facts()["oldest_lease_age_seconds"])

    assert http.lease(trainer).json()["batch_id"] == 1
    assert_facts(http, batches_redelivered_total=1)
    http.acknowledge(trainer, 1).raise_for_status()
    assert_facts(http, batches_acknowledged_total=1, leased_batches=1)
    assert 0 < http.run_facts()["leased_bytes"] < queued_bytes
    http.acknowledge(trainer, 2).raise_for_status()
    assert_facts(http, leased_bytes=0, oldest_lease_age_seconds=0, batches_delivered_total=2)


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


def test_every_address_answers_ipv4_too(own_api: StartApi) -> None:
    own_api("every-address", further={"--host": "::"})  # waits until 127.0.0.1 answers


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
