"""Request ids, the log and the token, on a run-api that asks for one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection

import httpx
import pytest
import redis

from grpo_api.redis_link import layout_prefix
from grpo_core.errors import RequestRefused
from grpo_core.run_api_client import TrainerClient
from tests.fixtures.run_api import MAX_BODY_BYTES, RunningApi, start_run_api
from tests.integration.run_api_calls import probe, register, scrape
from tests.support.wait import DEADLINE_S, wait_for

TOKEN = "correct-horse-battery-staple"
AUTHORIZATION = {"Authorization": f"Bearer {TOKEN}"}
OPEN = ("/health", "/healthz", "/readyz")
RUN_ID = "operations"


@pytest.fixture(scope="module")
def api(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApi]:
    running = start_run_api(
        redis_url,
        tmp_path_factory.mktemp("run-api"),
        run_id=RUN_ID,
        environment={"RUN_API_TOKEN": TOKEN, "RUN_API_LOG_LEVEL": "DEBUG"},
    )
    yield running
    running.process.stop()


@pytest.fixture(scope="module")
def stranger(api: RunningApi) -> Iterator[httpx.Client]:
    """A client without the token."""
    with httpx.Client(base_url=api.url, timeout=DEADLINE_S) as client:
        yield client


@pytest.fixture
def client(api: RunningApi) -> Iterator[httpx.Client]:
    """A client with the token, of a run that knows of no trainer yet."""
    with httpx.Client(base_url=api.url, timeout=DEADLINE_S, headers=AUTHORIZATION) as known:
        known.get("/reset_data").raise_for_status()
        yield known


def connect(api: RunningApi) -> HTTPConnection:
    return HTTPConnection(api.url.removeprefix("http://"), timeout=DEADLINE_S)


def log_lines(api: RunningApi, request_id: str, event: str) -> list[str]:
    """Log lines of a request, once there are any: those about its end follow its answer."""

    def found() -> list[str]:
        log = api.process.log_path.read_text().splitlines()
        return [line for line in log if f"request_id={request_id}" in line and event in line]

    return wait_for(found)


def test_every_answer_names_its_request(client: httpx.Client) -> None:
    for method, path, body, status in (
        ("GET", "/status", b"", 200),
        ("GET", "/nowhere", b"", 404),
        ("DELETE", "/status", b"", 405),
        ("POST", "/register", b"{}", 422),
        ("POST", "/scored_data_list", b" " * (MAX_BODY_BYTES + 1), 413),
    ):
        headers = {"X-Request-Id": f"id-{status}"}
        named = client.request(method, path, content=body, headers=headers)
        assert named.status_code == status
        assert named.headers.get_list("x-request-id") == [f"id-{status}"]
        unnamed = [client.request(method, path, content=body).headers for _ in range(2)]
        ids = {headers["x-request-id"] for headers in unnamed}
        assert len(ids) == 2
        assert all(re.fullmatch("[0-9a-f]{32}", made) for made in ids)


def test_a_defect_is_a_500_whose_traceback_is_found_by_the_id(
    api: RunningApi, client: httpx.Client, redis_url: str
) -> None:
    with redis.Redis.from_url(redis_url) as connection:
        connection.set(f"{layout_prefix(RUN_ID)}trainer", "not a hash")
        answer = client.get("/info", headers={"X-Request-Id": "defect-1"})
        connection.delete(f"{layout_prefix(RUN_ID)}trainer")
    assert answer.status_code == 500
    assert answer.json()["request_id"] == answer.headers["x-request-id"] == "defect-1"
    (line,) = log_lines(api, "defect-1", "Exception in ASGI application")
    assert "[error" in line

    def traceback() -> str:
        return api.process.log_path.read_text().partition(line)[2].lstrip()

    assert wait_for(traceback, lambda text: "WRONGTYPE" in text).startswith("Traceback")
    assert "[warning" in log_lines(api, "defect-1", "request failed")[0]
    assert client.get("/info").status_code == 200


def test_a_sender_that_leaves_is_no_defect(api: RunningApi, client: httpx.Client) -> None:
    with closing(connect(api)) as leaving:
        leaving.putrequest("POST", "/scored_data")
        for name, value in (*AUTHORIZATION.items(), ("X-Request-Id", "gone-1")):
            leaving.putheader(name, value)
        leaving.putheader("Content-Length", "100")
        leaving.endheaders(b"half of it")
        client.get("/healthz").raise_for_status()
    (line,) = log_lines(api, "gone-1", "path=/scored_data")
    assert "[debug" in line
    assert "status=499" in line
    counted = (("method", "POST"), ("route", "/scored_data"), ("status", "499"))
    assert scrape(client)["run_api_requests_total", counted] == 1


def test_without_the_token_every_route_but_probes_is_401_and_changes_nothing(
    stranger: httpx.Client, client: httpx.Client
) -> None:
    documented = client.get("/openapi.json").json()["paths"].items()
    routes = [(method, path) for path, methods in documented for method in methods]
    assert len(routes) > 15
    for method, path in [*routes, ("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/none")]:
        answer = stranger.request(method, path.replace("{batch_id}", "1"))
        if path in OPEN:
            assert probe(stranger, path).status_code == 200
        else:
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "Authorization: Bearer" in answer.json()["detail"]
    assert register(stranger).status_code == 401
    assert client.get("/info").json()["batch_size"] == -1


def test_the_client_sends_its_token_and_names_a_missing_one(api: RunningApi) -> None:
    with TrainerClient(api.url, token=TOKEN) as known, TrainerClient(api.url) as unknown:
        known.status()
        with pytest.raises(RequestRefused, match="Authorization: Bearer"):
            unknown.status()


def test_the_token_is_in_no_log(api: RunningApi, client: httpx.Client) -> None:
    client.get("/status")
    log = api.process.log_path.read_text()
    assert "token_needed=True" in log
    assert TOKEN not in log
