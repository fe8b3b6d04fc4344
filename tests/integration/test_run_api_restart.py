"""What survives when run-api or its Redis is killed, paused or started again."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import httpx
import pytest

from grpo_local.ports import free_port
from grpo_local.processes import ManagedProcess
from grpo_local.redis_server import bundled_redis, start_redis
from tests.fixtures.run_api import RunningApi, start_run_api
from tests.integration.run_api_calls import (
    next_batch,
    register,
    register_environment,
    send,
    start,
    status,
    status_env,
    submit,
)
from tests.support.process_table import eventually

PATIENT_S = 60.0
SHORT_S = 3.0
"""What a request waits for Redis, where it has to come back and where it does not."""
PROBE_S = 1.0
"""The same for a probe, whatever a request waits."""


class StartApi(Protocol):
    def __call__(self, redis_url: str, *, redis_deadline_s: float = PATIENT_S) -> RunningApi: ...


@pytest.fixture
def start_api(tmp_path: Path) -> Iterator[StartApi]:
    """Starts run-api processes of one run, and ends those that still live."""
    started: list[ManagedProcess] = []

    def start_one(redis_url: str, *, redis_deadline_s: float = PATIENT_S) -> RunningApi:
        api = start_run_api(
            redis_url, tmp_path, run_id=tmp_path.name, redis_deadline_s=redis_deadline_s
        )
        started.append(api.process)
        return api

    yield start_one
    for process in started:
        process.kill()


class OwnRedis:
    """A Redis that this test may stop and start again on the same port and files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._port = free_port()
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self.start()

    def start(self) -> None:
        self.process = start_redis(self._port, self._directory, bundled_redis())


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[OwnRedis]:
    redis = OwnRedis(tmp_path)
    yield redis
    redis.process.kill()


def client(api: RunningApi) -> httpx.Client:
    return httpx.Client(base_url=api.url, timeout=2 * PATIENT_S)


def test_killed_run_api_loses_nothing(redis_url: str, start_api: StartApi) -> None:
    first = start_api(redis_url)
    with client(first) as http:
        start(http)
        register_environment(http)
        submit(http, 1, 2, 3)
    first.process.kill()

    with client(start_api(redis_url)) as http:
        assert status(http) == (0, 3)
        assert len(http.get("/environments").json()) == 1
        assert next_batch(http) == [1, 2]
        assert status(http) == (1, 1)


def test_parts_wait_through_a_restart_and_meet_on_another_replica(
    redis_url: str, start_api: StartApi
) -> None:
    first = start_api(redis_url)
    with client(first) as http:
        start(http)
        register_environment(http, group_size=4)
        assert send(http, 1, size=3, env_id=0)["buffer_size"] == 3
    first.process.kill()

    with client(start_api(redis_url)) as one, client(start_api(redis_url)) as other:
        assert send(one, 2, size=2, env_id=0)["buffer_size"] == 5
        assert send(other, 3, size=1, env_id=0)["buffer_size"] == 2
        assert next_batch(one) == [1, 3]


def test_unacknowledged_batch_is_handed_out_again_by_a_new_process(
    redis_url: str, start_api: StartApi
) -> None:
    first = start_api(redis_url)
    with client(first) as http:
        start(http)
        submit(http, 1, 2, 3, 4)
        handed_out = http.get("/batch").content
    first.process.kill()

    with client(start_api(redis_url)) as http:
        register(http)
        assert http.get("/batch").content == handed_out
        assert status(http) == (1, 2)
        assert next_batch(http) == [3, 4]


def test_replicas_share_one_run(redis_url: str, start_api: StartApi) -> None:
    with client(start_api(redis_url)) as one, client(start_api(redis_url)) as other:
        start(one)
        submit(one, 1)
        submit(other, 2, 3, 4)
        assert next_batch(other) == [1, 2]
        assert next_batch(one) == [3, 4]
        assert status(one) == status(other) == (2, 0)


def test_redis_restart_is_waited_for(own_redis: OwnRedis, start_api: StartApi) -> None:
    with client(start_api(own_redis.url)) as http:
        start(http)
        register_environment(http)
        submit(http, 1, 2)
        own_redis.process.stop()
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(lambda: status_env(http, 0))
            time.sleep(0.5)
            own_redis.start()
            assert waiting.result().status_code == 200
        assert next_batch(http) == [1, 2]


def test_redis_that_hangs_or_is_gone_is_503_within_the_deadline(
    own_redis: OwnRedis, start_api: StartApi
) -> None:
    impatient_api = start_api(own_redis.url, redis_deadline_s=SHORT_S)
    with client(start_api(own_redis.url)) as http, client(impatient_api) as impatient:
        start(http)
        submit(http, 1, 2)
        own_redis.process.signal(signal.SIGSTOP)
        started = time.monotonic()
        assert_given_up(impatient.get("/batch"), SHORT_S)
        assert 2.0 < time.monotonic() - started < PATIENT_S
        own_redis.process.signal(signal.SIGCONT)
        assert eventually(lambda: impatient.get("/status").status_code == 200)
        assert next_batch(http) == [1, 2]
        assert status(http) == (1, 0)

        own_redis.process.stop()
        for path, deadline_s in (("/status", SHORT_S), ("/health", PROBE_S)):
            assert_given_up(impatient.get(path), deadline_s)
        own_redis.start()
        assert status(http) == (1, 0)
        assert eventually(lambda: impatient.get("/status").status_code == 200)


def assert_given_up(answer: httpx.Response, deadline_s: float) -> None:
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["detail"].startswith(f"Redis did not answer within {deadline_s:g} s")
