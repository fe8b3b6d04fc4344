"""run-api while Redis rejects writes, hangs, or is down."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from structlog.testing import capture_logs

from grpo_api.app import create_app
from grpo_api.errors import StoreUnavailable, UnsuitableRedis
from grpo_api.store.checks import check_redis, watch_disk
from grpo_api.store.redis import RedisLink, layout_prefix
from grpo_api.store.run import RunStore
from grpo_core.redis.server import LocalRedis
from grpo_core.redis.url import redis_password
from grpo_core.tree.run_api import RunApiSettings
from grpo_runs.process.ports import free_port
from tests.fixtures.run_api import RUN_ID, start_run_api
from tests.integration.conftest import forget_env_ids
from tests.integration.run_api_calls import ApiClient, bulky, group, leased
from tests.support.redis_server import OwnRedis
from tests.support.wait import DEADLINE_S, wait_for

SHORT_S = 0.5
"""Deadline of requests in tests in which Redis does not return."""
PROBE_S = 1.0
"""Deadline of a probe, independent of that of requests."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnRedis]:
    server = OwnRedis(tmp_path_factory.mktemp("redis"))
    with server.admin:
        yield server
    server.process.stop()


@pytest.fixture(scope="module")
def api(server: OwnRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiClient]:
    """A client of a run-api whose Redis deadline is longer than a test."""
    directory = tmp_path_factory.mktemp("run-api")
    running = start_run_api(server.url, directory, redis_deadline_s=DEADLINE_S)
    with ApiClient(base_url=running.url, timeout=2 * DEADLINE_S) as client:
        yield client
    running.process.stop()


@pytest.fixture
def http(api: ApiClient, server: OwnRedis) -> Iterator[ApiClient]:
    """A client of a run whose trainer has polled. After the test Redis accepts writes again."""
    api.get("/reset_data").raise_for_status()
    forget_env_ids(server.admin)
    api.start()
    yield api
    take_writes(server.admin)


def take_writes(own_redis: redis.Redis) -> None:
    own_redis.config_set("maxmemory", 0)
    own_redis.config_set("save", "")


def fill_at_once(own_redis: redis.Redis) -> None:
    own_redis.config_set("maxmemory", 1)


def fail_to_snapshot(own_redis: redis.Redis) -> None:
    """Let a snapshot fail, so that Redis rejects writes and even PING."""
    blocked = Path(str(own_redis.config_get("dir")["dir"])) / "a-folder.rdb"
    blocked.mkdir(exist_ok=True)
    own_redis.config_set("dbfilename", blocked.name)
    own_redis.config_set("save", "3600 1")
    own_redis.bgsave()
    wait_for(
        lambda: own_redis.info("persistence"),
        lambda told: (told["rdb_bgsave_in_progress"], told["rdb_last_bgsave_status"]) == (0, "err"),
    )


def assert_unavailable(answer: httpx.Response, detail: str) -> None:
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["detail"].startswith(detail)


def assert_refused(answer: httpx.Response, code: str) -> None:
    assert_unavailable(answer, f"Redis rejects writes ({code}): ")


def assert_given_up(answer: httpx.Response, deadline_s: float) -> None:
    assert_unavailable(answer, f"Redis did not answer within {deadline_s:g} s")


@pytest.mark.parametrize(("refuse", "code"), [(fill_at_once, "OOM"), (fail_to_snapshot, "MISCONF")])
def test_submissions_are_503_and_nothing_is_queued(
    http: ApiClient, server: OwnRedis, refuse: Callable[[redis.Redis], None], code: str
) -> None:
    http.register_environment(group_size=4)
    http.submit(1)
    refuse(server.admin)
    large = group(9, **bulky(9, tokens=140_000))  # staged in pieces
    for body in (group(2), group(3, env_id=0), large):
        assert_refused(http.post("/scored_data", json=body), code)
        assert_refused(http.post("/scored_data_list", json=[body]), code)
    assert http.status() == (0, 1)
    take_writes(server.admin)
    assert http.status() == (0, 1)
    http.submit(2)
    assert http.next_batch() == [1, 2]


def test_where_nothing_can_be_written_every_route_answers(
    http: ApiClient, server: OwnRedis
) -> None:
    http.register_environment()
    http.submit(1, 2, 3, 4)
    assert http.next_batch() == [1, 2]
    fail_to_snapshot(server.admin)
    needs_writes = (
        http.get("/batch"),
        http.register(),
        http.status_env(0),
        http.post("/disconnect-env", json={"env_id": 0}),
        http.get("/reset_data"),
    )
    assert [answer.status_code for answer in needs_writes] == [503] * len(needs_writes)
    for path in ("/status", "/info", "/environments", "/latest_example", "/metrics", "/healthz"):
        assert http.get(path).status_code == 200, path
    for path in ("/readyz", "/health"):
        assert_refused(http.probe(path), "MISCONF")
    take_writes(server.admin)
    assert http.probe("/readyz").status_code == 200
    assert http.next_batch() == [3, 4]


def test_leases_are_handed_out_and_acknowledged_where_memory_is_full(
    http: ApiClient, server: OwnRedis
) -> None:
    http.submit(*range(6))
    http.submit(6, size=4)
    fill_at_once(server.admin)
    trainer = http.register().raise_for_status().json()["uuid"]
    first = http.lease(trainer)
    assert leased(first) == (1, [0, 1])
    assert http.lease(trainer).content == first.content
    assert leased(http.lease(trainer, after=1)) == (2, [2, 3])

    trainer = http.register().raise_for_status().json()["uuid"]
    assert http.lease(trainer).content == first.content
    done = {"status": "success", "acknowledged": 2, "released": 2}
    assert http.acknowledge(trainer, 2).json() == done
    batches = [leased(http.lease(trainer, after)) for after in (2, 3)]
    assert batches == [(3, [4, 5]), (4, [6])]
    # the last batch has only the latest example, which stays, so no memory is freed
    for batch_id in (3, 4):
        assert http.acknowledge(trainer, batch_id).json()["released"] == 1
    assert http.lease(trainer, after=4).json()["batch"] is None
    assert http.status() == (4, 0)


@pytest.fixture
async def impatient(server: OwnRedis) -> AsyncIterator[httpx.AsyncClient]:
    """A replica whose Redis deadline is `SHORT_S`."""
    settings = RunApiSettings(redis_url=server.url, run_id=RUN_ID, redis_deadline_s=SHORT_S)
    link = RedisLink(server.url, RUN_ID, SHORT_S)
    store = RunStore(link, settings.environment_timeout_s, settings.leased_bytes_limit)
    transport = httpx.ASGITransport(create_app(store, settings, asyncio.Event()))
    async with httpx.AsyncClient(transport=transport, base_url="http://run-api") as replica:
        yield replica
    await link.close()


async def test_redis_that_hangs_or_is_gone_is_503_or_waited_for_and_loses_nothing(
    http: ApiClient, impatient: httpx.AsyncClient, server: OwnRedis
) -> None:
    step, _ = http.status()
    http.register_environment()
    http.submit(1, 2)
    server.process.signal(signal.SIGSTOP)
    async with asyncio.timeout(DEADLINE_S):  # a request in this process has none
        with capture_logs() as logs:
            assert_given_up(await impatient.get("/batch"), SHORT_S)
    assert logs[-1]["reason"].startswith("Redis did not answer within")
    assert_given_up(http.get("/readyz"), PROBE_S)
    assert http.get("/healthz").json() == {"status": "ok"}
    scraped = http.get("/metrics").raise_for_status().text
    assert "run_api_redis_up 0.0" in scraped
    assert "run_api_step" not in scraped
    server.process.signal(signal.SIGCONT)
    assert http.next_batch() == [1, 2]
    assert http.status() == (step + 1, 0)

    server.process.stop()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(lambda: http.status_env(0))
        for path in ("/status", "/health"):
            assert_given_up(await impatient.get(path), SHORT_S)
        # the probe has its own deadline, although the waiting request began earlier
        assert http.get("/readyz").status_code == 503
        assert not waiting.done()
        server.start()
        assert waiting.result().status_code == 200
    assert http.status() == (step + 1, 0)
    assert http.probe("/readyz").json() == {"status": "ok"}
    assert http.run_facts()["step"] == step + 1


async def test_a_connection_that_breaks_before_its_first_byte_is_503(
    server: OwnRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvloop raises this error, which redis-py does not convert, when Redis is killed."""
    link = RedisLink(server.url, RUN_ID, DEADLINE_S)

    async def closed(*_: Any) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport>; the handler is closed")

    monkeypatch.setattr(link._redis, "execute_command", closed)
    with pytest.raises(StoreUnavailable, match="closed a connection"):
        await link.call("PING")
    await link.close()


async def test_bytes_that_are_no_answer_of_redis_are_503() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as another:
        port = another.sockets[0].getsockname()[1]
        link = RedisLink(f"redis://127.0.0.1:{port}/0", RUN_ID, SHORT_S)
        with pytest.raises(StoreUnavailable, match=r"not Redis' protocol .*--redis-url"):
            await link.call("PING")
        await link.close()


async def test_a_redis_that_loads_is_asked_again_on_another_connection() -> None:
    loading, scripts = [b"-LOADING Redis is loading the dataset in memory"] * 3, 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal scripts
        async for line in reader:
            if line.rstrip() == b"EVAL":
                scripts += not loading
                writer.write((loading.pop() if loading else b"*2\r\n$1\r\na\r\n:0") + b"\r\n")
            elif line.rstrip() in (b"CLIENT", b"PING"):
                writer.write(b"+OK\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as redis_process:
        port = redis_process.sockets[0].getsockname()[1]
        link = RedisLink(f"redis://127.0.0.1:{port}/0", RUN_ID, DEADLINE_S)
        await link.call("PING")
        await link.close()
    assert (loading, scripts) == ([], 1)


async def test_run_api_takes_a_unix_socket_of_redis(tmp_path: Path) -> None:
    link = RedisLink(f"unix://{tmp_path}/redis", RUN_ID, SHORT_S)
    with pytest.raises(StoreUnavailable, match="No such file"):
        await link.call("PING")
    await link.close()


async def test_the_log_names_how_often_redis_writes_or_warns_that_it_forgets(
    server: OwnRedis,
) -> None:
    async def report() -> Any:
        link = RedisLink(server.url, "start", DEADLINE_S)
        with capture_logs() as logs:
            await check_redis(link)
        await link.close()
        (line,) = logs
        return line

    line = await report()
    assert (line["log_level"], line["appendfsync"]) == ("info", "always")
    server.admin.config_set("appendfsync", "everysec")
    line = await report()
    assert (line["event"], line["appendfsync"]) == ("redis.may_lose_groups", "everysec")
    assert "--appendfsync always" in line["hint"]
    server.admin.config_set("appendfsync", "always")
    server.admin.config_set("appendonly", "no")
    line = await report()
    assert line["log_level"] == "warning"
    assert "--appendonly yes" in line["hint"]
    server.admin.config_set("appendonly", "yes")


def forgets(admin: redis.Redis) -> None:
    admin.config_set("maxmemory-policy", "volatile-lru")


def has_another_layout(admin: redis.Redis) -> None:
    admin.hset(layout_prefix("moved", 5) + "trainer", "batch_size", "4")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (forgets, "CONFIG SET maxmemory-policy noeviction"),
        (
            has_another_layout,
            "has run moved in layout 5, which another release of run-api wrote",
        ),
    ],
)
def test_a_redis_that_does_not_suit_ends_run_api_with_the_reason(
    server: OwnRedis, spoil: Callable[[redis.Redis], None], says: str
) -> None:
    spoil(server.admin)
    command = [sys.executable, "-m", "grpo_api", "--redis-url", server.url, "--run-id", "moved"]
    command += ["--port", str(free_port())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    finally:
        server.admin.config_set("maxmemory-policy", "noeviction")
    assert done.returncode == 1
    told = done.stdout + done.stderr
    assert UnsuitableRedis.__name__ in told
    assert says in told


async def test_a_warning_comes_before_the_disk_is_full(server: OwnRedis) -> None:
    link = RedisLink(server.url, "disk", DEADLINE_S)
    server.admin.set("held", "x" * 100_000)
    with capture_logs() as logs:
        for disk_bytes in (10_000_000_000, 100_000):
            watching = asyncio.create_task(watch_disk(link, disk_bytes, poll_s=0.01))
            if disk_bytes == 100_000:
                while not logs:
                    await asyncio.sleep(0.01)
            watching.cancel()
    await link.close()
    (line,) = logs
    assert line["event"] == "redis.disk_nearly_full"
    assert line["append_only_file_bytes"] > 75_000
    server.admin.delete("held")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_redis_goes_on_once_a_full_disk_has_room(small_disk: Path) -> None:
    """It ends when the disk is full; LocalRedis starts it again, with everything that it has
    acknowledged."""
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 2**20)
    port = free_port()
    with (
        LocalRedis(small_disk / "redis", port),
        redis.Redis(
            port=port, password=redis_password(small_disk / "redis"), retry=Retry(NoBackoff(), 0)
        ) as client,
    ):
        acknowledged = 0
        while _takes_writes(client, str(acknowledged)):
            acknowledged += 1
        ballast.unlink()
        wait_for(lambda: _takes_writes(client), deadline_s=DEADLINE_S)
        kept = sum(client.exists(str(number)) for number in range(acknowledged))
        assert 0 < kept == acknowledged


def _takes_writes(client: redis.Redis, key: str = "again") -> bool:
    try:
        return bool(client.set(key, b"x" * 100_000))
    except redis.RedisError:
        return False
