"""Logging, tokens, requests of other sites, and `/metrics`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import redis

from grpo_api.store.redis import layout_prefix
from grpo_core.clients.run_api import TrainerClient
from grpo_core.errors import RequestRefused
from tests.fixtures.run_api import RunningApi
from tests.integration.conftest import StartApi
from tests.integration.run_api_calls import REGISTRATION, ApiClient
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


def test_a_page_of_another_site_resets_nothing_and_takes_no_batch(http: ApiClient) -> None:
    http.start()
    http.submit(1, 2)
    pages = [
        ({"Sec-Fetch-Site": "cross-site"}, "a web page of another site"),
        ({"Host": "rebound.example", "Sec-Fetch-Site": "same-origin"}, "--allowed-hosts"),
    ]
    for path, (headers, says) in itertools.product(("/reset_data", "/batch"), pages):
        answer = http.get(path, headers=headers)
        assert answer.status_code == 403
        assert says in answer.json()["detail"]
        assert "x-request-id" in answer.headers
    assert http.run_facts()["queued_groups"] == 2


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
    for method, route, status in (
        ("GET", "/status", "200"),
        ("GET", "unmatched", "404"),
        ("POST", "/batch/{batch_id}/ack", "422"),
    ):
        labels = (("method", method), ("route", route), ("status", status))
        series = ("run_api_requests_total", labels)
        assert after[series] - before.get(series, 0) == 2
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
