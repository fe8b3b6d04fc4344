"""What survives when run-api or its Redis is killed, paused or started again."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from grpo_api.app import create_app
from grpo_api.lifetime import Lifetime
from grpo_api.redis_link import RedisLink
from grpo_api.settings import RunApiSettings
from grpo_api.store import RunStore
from grpo_local.ports import free_port
from grpo_local.redis_server import bundled_redis, start_redis
from tests.fixtures.run_api import RUN_ID, RunningApi, start_run_api
from tests.integration.run_api_calls import (
    next_batch,
    probe,
    register,
    register_environment,
    run_facts,
    send,
    start,
    status,
    status_env,
    submit,
)
from tests.support.wait import DEADLINE_S, wait_for

SHORT_S = 0.5
"""How long a request waits for a Redis that does not come back while it waits."""
PROBE_S = 1.0
"""The same for a probe, whatever a request waits."""


def client(api: RunningApi) -> httpx.Client:
    return httpx.Client(base_url=api.url, timeout=2 * DEADLINE_S)


def test_a_killed_run_api_loses_nothing(http: httpx.Client, redis_url: str, tmp_path: Path) -> None:
    """Another process serves its queue, environments, parts and the batch it handed out."""
    killed = start_run_api(redis_url, tmp_path)
    with client(killed) as first:
        start(first)
        register_environment(first, group_size=4)
        submit(first, 1, 2, 3)
        assert send(first, 4, size=3, env_id=0)["buffer_size"] == 3
        handed_out = first.get("/batch").content
        killed.process.kill()

    assert status(http) == (1, 1)
    assert len(http.get("/environments").json()) == 1
    register(http)
    assert http.get("/batch").content == handed_out
    assert send(http, 5, size=1, env_id=0)["buffer_size"] == 0
    assert next_batch(http) == [4, 5]
    submit(http, 6)
    assert next_batch(http) == [3, 6]


class OwnRedis:
    """A Redis that these tests may stop and start again on the same port and files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._port = free_port()
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self.start()

    def start(self) -> None:
        self.process = start_redis(self._port, self._directory, bundled_redis())


@pytest.fixture(scope="module")
def own_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnRedis]:
    redis = OwnRedis(tmp_path_factory.mktemp("redis"))
    yield redis
    redis.process.kill()


@pytest.fixture(scope="module")
def patient(
    own_redis: OwnRedis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """A client of a run-api that waits for that Redis as long as a test may take."""
    directory = tmp_path_factory.mktemp("run-api")
    api = start_run_api(own_redis.url, directory, redis_deadline_s=DEADLINE_S)
    with client(api) as patient:
        start(patient)
        yield patient
    api.process.kill()


@pytest.fixture
async def impatient(own_redis: OwnRedis) -> AsyncIterator[httpx.AsyncClient]:
    """A replica, in this process, that waits for Redis for `SHORT_S`."""
    settings = RunApiSettings(redis_url=own_redis.url, run_id=RUN_ID, redis_deadline_s=SHORT_S)
    link = RedisLink(settings.redis_url, settings.run_id, settings.redis_deadline_s)
    store = RunStore(link, settings.environment_timeout_s, settings.max_leased_bytes)
    transport = httpx.ASGITransport(create_app(store, settings, Lifetime()))
    async with httpx.AsyncClient(transport=transport, base_url="http://run-api") as replica:
        yield replica
    await store.close()


def test_redis_restart_is_waited_for(patient: httpx.Client, own_redis: OwnRedis) -> None:
    register_environment(patient)
    submit(patient, 1, 2)
    own_redis.process.stop()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(lambda: status_env(patient, 0))
        # the probe gives up on its own try, which the waiting request began before
        wait_for(lambda: patient.get("/readyz").status_code, lambda code: code == 503)
        assert not waiting.done()
        own_redis.start()
        assert waiting.result().status_code == 200
    assert next_batch(patient) == [1, 2]


async def test_redis_that_hangs_or_is_gone_is_503_and_loses_nothing(
    patient: httpx.Client, impatient: httpx.AsyncClient, own_redis: OwnRedis
) -> None:
    step, _ = status(patient)
    submit(patient, 1, 2)
    own_redis.process.signal(signal.SIGSTOP)
    assert_given_up(await impatient.get("/batch"), SHORT_S)
    assert_given_up(patient.get("/readyz"), PROBE_S)
    assert patient.get("/healthz").json() == {"status": "ok"}
    scraped = patient.get("/metrics").raise_for_status().text
    assert "run_api_redis_up 0.0" in scraped
    assert "run_api_step" not in scraped
    own_redis.process.signal(signal.SIGCONT)
    assert next_batch(patient) == [1, 2]
    assert status(patient) == (step + 1, 0)

    own_redis.process.stop()
    for path in ("/status", "/health"):
        assert_given_up(await impatient.get(path), SHORT_S)
    own_redis.start()
    assert status(patient) == (step + 1, 0)
    assert probe(patient, "/readyz").json() == {"status": "ok"}
    assert run_facts(patient)["step"] == step + 1


def assert_given_up(answer: httpx.Response, deadline_s: float) -> None:
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["detail"].startswith(f"Redis did not answer within {deadline_s:g} s")
