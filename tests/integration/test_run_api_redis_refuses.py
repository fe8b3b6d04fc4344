"""What run-api does while its Redis answers, and refuses to write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from grpo_local.ports import free_port
from grpo_local.redis_server import bundled_redis, start_redis
from tests.fixtures.run_api import start_run_api
from tests.integration.run_api_calls import (
    acknowledge,
    bulky,
    group,
    lease,
    leased,
    next_batch,
    probe,
    register,
    register_environment,
    start,
    status,
    status_env,
    submit,
    told,
)
from tests.support.wait import DEADLINE_S, wait_for

ROOM_BYTES = 256 * 1024


@pytest.fixture(scope="module")
def own_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis.Redis]:
    """A Redis whose configuration is these tests' own."""
    port = free_port()
    server = start_redis(port, tmp_path_factory.mktemp("redis"), bundled_redis())
    with redis.Redis(host="127.0.0.1", port=port, socket_timeout=DEADLINE_S) as client:
        yield client
    server.stop()


@pytest.fixture(scope="module")
def api(own_redis: redis.Redis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    port = own_redis.connection_pool.connection_kwargs["port"]
    running = start_run_api(f"redis://127.0.0.1:{port}/0", tmp_path_factory.mktemp("run-api"))
    with httpx.Client(base_url=running.url, timeout=2 * DEADLINE_S) as client:
        yield client
    running.process.stop()


@pytest.fixture
def http(api: httpx.Client, own_redis: redis.Redis) -> Iterator[httpx.Client]:
    """A client of a run that a trainer has asked for a batch; Redis takes writes afterwards."""
    api.get("/reset_data").raise_for_status()
    start(api)
    yield api
    take_writes(own_redis)


def take_writes(own_redis: redis.Redis) -> None:
    own_redis.config_set("maxmemory", 0)
    own_redis.config_set("min-replicas-to-write", 0)
    own_redis.config_set("save", "")
    own_redis.replicaof("NO", "ONE")


def fill_memory(own_redis: redis.Redis, http: httpx.Client) -> int:
    """Leave a little room and submit until it is used up; returns how many groups were taken."""
    own_redis.config_set("maxmemory", own_redis.info("memory")["used_memory"] + ROOM_BYTES)
    taken = 0
    while http.post("/scored_data", json=group(taken, **bulky(taken))).status_code == 200:
        taken += 1
    assert taken > 4
    return taken


def fill_at_once(own_redis: redis.Redis) -> None:
    own_redis.config_set("maxmemory", 1)


def fail_to_snapshot(own_redis: redis.Redis) -> None:
    """Let a snapshot fail, after which Redis takes no writes and answers not even PING."""
    blocked = Path(str(own_redis.config_get("dir")["dir"])) / "a-folder.rdb"
    blocked.mkdir(exist_ok=True)
    own_redis.config_set("dbfilename", blocked.name)
    own_redis.config_set("save", "3600 1")
    own_redis.bgsave()
    wait_for(lambda: has_failed_to_snapshot(own_redis))


def has_failed_to_snapshot(own_redis: redis.Redis) -> bool:
    """The one that was begun last: an earlier one may have failed as well."""
    told = own_redis.info("persistence")
    return told["rdb_bgsave_in_progress"] == 0 and told["rdb_last_bgsave_status"] == "err"


def miss_replicas(own_redis: redis.Redis) -> None:
    own_redis.config_set("min-replicas-to-write", 1)


def become_a_replica(own_redis: redis.Redis) -> None:
    own_redis.replicaof("127.0.0.1", free_port())


def assert_refused(answer: httpx.Response, code: str) -> None:
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["detail"].startswith(f"Redis takes no writes ({code}): ")


def large_group() -> dict[str, Any]:
    """One that is sent to Redis in pieces ahead of being queued."""
    return group(9, **bulky(9, tokens=140_000))


@pytest.mark.parametrize(
    ("refuse", "code"),
    [
        (fill_at_once, "OOM"),
        (fail_to_snapshot, "MISCONF"),
        (miss_replicas, "NOREPLICAS"),
        (become_a_replica, "READONLY"),
    ],
)
def test_submissions_are_503_and_nothing_is_queued(
    http: httpx.Client, own_redis: redis.Redis, refuse: Callable[[redis.Redis], None], code: str
) -> None:
    register_environment(http, group_size=4)
    submit(http, 1)
    refuse(own_redis)
    for body in (group(2), group(3, env_id=0), large_group()):
        assert_refused(http.post("/scored_data", json=body), code)
        assert_refused(http.post("/scored_data_list", json=[body]), code)
    assert status(http) == (0, 1)
    take_writes(own_redis)
    assert status(http) == (0, 1)
    submit(http, 2)
    assert next_batch(http) == [1, 2]


def test_where_nothing_can_be_written_every_route_answers(
    http: httpx.Client, own_redis: redis.Redis
) -> None:
    register_environment(http)
    submit(http, 1, 2, 3, 4)
    assert next_batch(http) == [1, 2]
    miss_replicas(own_redis)
    needs_writes = (
        http.get("/batch"),
        register(http),
        status_env(http, 0),
        http.post("/disconnect-env", json={"env_id": 0}),
        http.get("/reset_data"),
    )
    assert [answer.status_code for answer in needs_writes] == [503] * len(needs_writes)
    for path in ("/status", "/info", "/environments", "/latest_example", "/metrics", "/healthz"):
        assert http.get(path).status_code == 200, path
    take_writes(own_redis)
    assert next_batch(http) == [3, 4]


def test_after_a_failed_snapshot_the_server_is_not_ready(
    http: httpx.Client, own_redis: redis.Redis
) -> None:
    fail_to_snapshot(own_redis)
    for path in ("/readyz", "/health"):
        assert_refused(probe(http, path), "MISCONF")
    take_writes(own_redis)
    assert probe(http, "/readyz").status_code == 200


def test_leases_are_handed_out_and_acknowledged_where_memory_is_full(
    http: httpx.Client, own_redis: redis.Redis
) -> None:
    submit(http, *range(6))
    submit(http, 6, size=4)
    fill_at_once(own_redis)
    trainer = register(http).raise_for_status().json()["uuid"]
    first = lease(http, trainer)
    assert leased(first) == (1, [0, 1])
    assert lease(http, trainer).content == first.content
    assert leased(lease(http, trainer, after=1)) == (2, [2, 3])

    trainer = register(http).raise_for_status().json()["uuid"]
    assert lease(http, trainer).content == first.content
    assert acknowledge(http, trainer, 2).json()["released"] == 2
    batches = [leased(lease(http, trainer, after)) for after in (2, 3)]
    assert batches == [(3, [4, 5]), (4, [6])]
    # the last one holds the latest example, which stays: nothing else is there to be released
    for batch_id in (3, 4):
        assert acknowledge(http, trainer, batch_id).json()["released"] == 1
    assert lease(http, trainer, after=4).json() == {"batch": None}
    assert status(http) == (4, 0)


def test_a_new_run_where_memory_is_full_begins(http: httpx.Client, own_redis: redis.Redis) -> None:
    assert own_redis.flushall()
    fill_at_once(own_redis)
    trainer = register(http).raise_for_status().json()["uuid"]
    assert lease(http, trainer).json() == {"batch": None}
    assert status(http) == (0, 0)


def test_plain_polls_go_on_where_memory_is_full(http: httpx.Client, own_redis: redis.Redis) -> None:
    submit(http, 1, 2, 3, 4)
    fill_at_once(own_redis)
    assert [next_batch(http) for _ in range(3)] == [[1, 2], [3, 4], None]


def test_environments_that_poll_stay_where_memory_is_full(
    http: httpx.Client, own_redis: redis.Redis
) -> None:
    register_environment(http)
    (seen,) = own_redis.keys("*:seen")
    before = own_redis.hincrby(seen, "0", -1000)  # both could be of the same millisecond
    fill_at_once(own_redis)
    assert told(http, 0)["env_weight"] > 0
    assert int(own_redis.hget(seen, "0") or 0) >= before + 1000


def test_memory_that_was_full_takes_submissions_again_once_batches_are_done(
    http: httpx.Client, own_redis: redis.Redis
) -> None:
    taken = fill_memory(own_redis, http)
    assert_refused(http.post("/scored_data", json=group(0, **bulky(0))), "OOM")
    assert status(http) == (0, taken)
    batches = taken // 2
    assert [next_batch(http) for _ in range(batches)] == [
        [2 * n, 2 * n + 1] for n in range(batches)
    ]
    submit(http, taken, **bulky(taken))
