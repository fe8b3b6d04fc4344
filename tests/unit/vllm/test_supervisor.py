"""The supervisor with real sockets and a real Redis; its stand-in engines start in a second.

Most tests share one supervisor, in any order: each publishes its own weights and compares counters
with their previous values.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from redis import Redis

from grpo_core.weights.ref import UNTRAINED
from grpo_core.weights.servers import ServerState, ServerStatus, server_key, servers_key
from grpo_core.weights.version_log import VersionLog
from grpo_core.weights.versions import MANIFEST, Announcement, VersionKind, version_id
from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.supervisor.restart_policy import STABLE_AFTER_S, RestartPolicy
from tests.fixtures.announcer import Announcer, described
from tests.support.process_table import is_alive
from tests.support.wait import wait_for
from tests.unit.vllm.stub_engine import BAD_RANK, BROKEN, DTYPE, HELD, OBSTACLE, TORN
from tests.unit.vllm.supervised import START_S, Supervised, supervised

RESTART_LIMIT = 3
"""Above the crashes of two tests together, so only the test that breaks all engines reaches it."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[Supervised]:
    directory = tmp_path_factory.mktemp("server")
    with supervised(directory, redis_url, "--restart-limit", str(RESTART_LIMIT)) as server:
        yield server


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[Supervised]:
    """A supervisor whose engines load adapters."""
    with supervised(tmp_path_factory.mktemp("lora"), redis_url, "--enable-lora") as server:
        yield server


@pytest.fixture(scope="module")
def unforked(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[Supervised]:
    """A supervisor whose engines are not forked and drop requests soon when they drain."""
    directory = tmp_path_factory.mktemp("unforked")
    flags = ("--drain-s", "0.2")
    with supervised(directory, redis_url, *flags, environment={OBSTACLE: "has threads"}) as server:
        yield server


def test_a_restart_costs_no_request_and_no_connection(server: Supervised, tmp_path: Path) -> None:
    """One request in flight, and one on an idle connection while no engine accepts requests."""
    before, engine, go_on = server.status(), server.generate()["pid"], tmp_path / "go on"

    def drains() -> int:
        return server.process.log_path.read_text().count("engine.draining")

    def port_seen_by_the_engine() -> int:
        """Of the client. It stays the same while the connection is open."""
        port: int = json.loads(idle.getresponse().read())["port"]
        return port

    drained, idle = drains(), http.client.HTTPConnection("127.0.0.1", server.port, timeout=START_S)
    with contextlib.closing(idle), ThreadPoolExecutor(1) as pool:
        idle.request("POST", "/generate", "{}")
        port = port_seen_by_the_engine()
        under_way = pool.submit(server.post, until=str(go_on))
        server.wait_for_requests(1)
        version = server.next_version()
        path = server.checkpoint(version)
        sent = server.announcer.announce(version, path, restarts=True)
        server.wait_for(state="draining")
        wait_for(lambda: drains() > drained)  # the supervisor reports it before the engine is told
        idle.request("POST", "/generate", "{}")
        go_on.touch()
        assert under_way.result().json()["pid"] == engine
        assert under_way.result().headers["connection"] == "close"
        assert port_seen_by_the_engine() == port, "the connection was closed"
    assert server.announcer.settled(sent).version == version
    assert server.serves(version)
    after = server.status()
    counted = [after[what] - before[what] for what in ("restarts", "crashes", "dropped_requests")]
    assert counted == [1, 0, 0]


def test_requests_that_outlast_the_drain_are_answered_503_and_counted(
    unforked: Supervised, tmp_path: Path
) -> None:
    dropped = unforked.count("dropped_requests")
    with ThreadPoolExecutor(1) as pool:
        endless = pool.submit(unforked.post, until=str(tmp_path / "never"))
        unforked.wait_for_requests(1)
        unforked.publish()
        assert endless.result().status_code == 503
        assert "send the request again" in endless.result().json()["detail"]
        assert endless.result().headers["retry-after"]
    assert unforked.count("dropped_requests") == dropped + 1


def test_an_engine_that_cannot_be_forked_is_started_anew(unforked: Supervised) -> None:
    version = unforked.publish()
    assert unforked.serves(version)
    engine = psutil.Process(unforked.status()["engine_pid"])
    assert engine.cmdline()[1:3] == ["-m", "tests.unit.vllm.stub_engine"]
    assert "has threads" in unforked.process.log_path.read_text()


def test_an_engine_that_crashes_is_followed_by_one_with_the_same_weights(lora: Supervised) -> None:
    version, host, engine = (
        lora.publish(restarts=False, adapter=True),
        lora.host,
        lora.status()["engine_pid"],
    )
    crashes = lora.count("crashes")
    os.kill(engine, signal.SIGKILL)
    lora.wait_for(state="serving", crashes=crashes + 1)
    assert lora.serves(version)
    assert lora.generate()["pid"] != engine
    assert lora.host == host, "engines are forked from one process"


def test_a_host_that_is_killed_takes_its_engine_along_and_both_are_replaced(
    server: Supervised,
) -> None:
    version, host, engine = server.publish(), server.host, server.status()["engine_pid"]
    crashes = server.count("crashes")
    host.kill()
    server.wait_for(state="serving", crashes=crashes + 1)
    assert server.serves(version)
    assert server.host != host
    wait_for(lambda: not psutil.pid_exists(engine))  # until it is reaped


def test_engines_that_keep_failing_are_given_up_until_new_weights_are_announced(
    server: Supervised,
) -> None:
    with server.engines(BROKEN):
        os.kill(server.status()["engine_pid"], signal.SIGKILL)
        reason = server.wait_for(state="failed")["reason"]
        assert f"{RESTART_LIMIT} engines failed in a row" in reason
        refused = server.post()
        assert (refused.status_code, refused.json()["detail"]) == (503, reason)
        assert httpx.get(f"{server.health_url}/healthz").status_code == 503
    assert server.serves(server.publish())
    assert httpx.get(f"{server.health_url}/healthz").status_code == 200


def test_weights_are_loaded_while_the_engine_runs(server: Supervised) -> None:
    before = server.status()
    version = server.publish(restarts=False)
    assert server.serves(version)
    after = server.status()
    assert (after["engine_pid"], after["pause_s"]) == (before["engine_pid"], 0.25)
    assert after["path"] == str(server.weights / version_id(version)), "used in place"
    assert set(after["in_use"].split()) >= {version_id(version), Path(before["path"]).name} - {""}


def test_the_same_weights_under_another_name_only_get_the_name(server: Supervised) -> None:
    served, engine = server.publish(restarts=False), server.status()["engine_pid"]
    renamed = server.next_version()
    path = server.weights / version_id(served)
    announced = server.announcer.announce(renamed, path, sources=(), restarts=True)
    assert server.announcer.settled(announced).path == str(path)
    assert server.serves(renamed)
    assert server.status()["engine_pid"] == engine


def test_a_run_that_begins_with_the_base_model_costs_no_restart(
    tmp_path: Path, redis_url: str
) -> None:
    with supervised(tmp_path, redis_url) as server:
        begun = Announcement(epoch=1, step=0, kind=VersionKind.BASE, restarts=True)
        with VersionLog(redis_url, server.announcer.run_id, START_S) as log:
            log.announce(begun)
        assert server.announcer.settled(begun).restarts == 0


def test_an_engine_that_ends_while_it_loads_is_replaced_by_one_with_the_new_weights(
    server: Supervised,
) -> None:
    torn = server.count("torn")
    with server.engines(TORN):
        version = server.publish(restarts=False)
    assert server.serves(version)
    assert server.count("torn") == torn + 1


def test_weights_that_no_engine_starts_with_are_refused_and_the_previous_ones_return(
    server: Supervised,
) -> None:
    served, version = server.publish(), server.next_version()
    with server.engines(BROKEN):
        announced = server.announcer.announce(version, server.checkpoint(version), restarts=True)
        status = server.announcer.settled(announced)
    assert status.refused == announced.id
    assert "the engine ended with status 3" in status.reason
    server.wait_for(state="serving")
    assert server.serves(served)
    assert server.serves(server.publish())


def test_an_engine_that_is_killed_while_it_starts_with_new_weights_is_followed_by_another(
    server: Supervised,
) -> None:
    served, version = server.publish(), server.next_version()
    before = server.status()
    with server.engines(HELD):
        announced = server.announcer.announce(version, server.checkpoint(version), restarts=True)
        new = wait_for(
            lambda: server.status(),
            lambda now: (
                now["state"] == "restarting" and now["engine_pid"] not in (0, before["engine_pid"])
            ),
        )
        os.kill(new["engine_pid"], signal.SIGKILL)
        server.wait_for(crashes=before["crashes"] + 1)
    assert server.announcer.settled(announced).version == version != served
    assert server.serves(version)


def test_versions_that_a_server_cannot_serve_are_refused_with_the_reason_and_change_nothing(
    lora: Supervised,
) -> None:
    served, restarts = lora.publish(restarts=False, adapter=True), lora.count("restarts")
    for make, reason in (
        (lambda v: lora.adapter(v, rank=64), "has rank 64, but the server accepts at most 16"),
        (lambda v: lora.adapter(v, **{BAD_RANK: ""}), "the engine does not like it"),
        (lora.checkpoint, "is a whole model; start the server without --enable-lora"),
    ):
        version = lora.next_version()
        announced = lora.announcer.announce(version, make(version))
        status = lora.announcer.settled(announced)
        assert status.refused == announced.id
        assert reason in status.reason
    assert lora.serves(served)
    assert lora.count("restarts") == restarts


def test_a_killed_supervisor_ends_its_engine_and_the_next_one_serves_the_newest(
    tmp_path: Path, redis_url: str
) -> None:
    with supervised(tmp_path, redis_url) as first:
        first.publish()
        gone = [first.host.pid, first.status()["engine_pid"]]
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait(START_S)
        for pid in gone:
            wait_for(lambda pid=pid: not is_alive(pid))
    for _ in range(2):  # announced while no server was there
        version = first.next_version()
        first.announcer.announce(version, first.checkpoint(version))
    again = {"run_id": first.announcer.run_id, "port": first.port}
    with supervised(tmp_path, redis_url, **again) as second:
        assert second.serves(version)
        engine = second.status()["engine_pid"]
        second.process.signal(signal.SIGTERM)
        assert second.process.wait(START_S) == 0
        assert not psutil.pid_exists(engine)
        assert second.announcer.status() is None, "it has left"


def test_a_server_whose_weights_are_missing_joins_when_newer_ones_are_announced(
    tmp_path: Path, redis_url: str
) -> None:
    run_id, version = uuid.uuid4().hex, PolicyVersion(1, 7)
    announcer = Announcer(redis_url, run_id)
    (tmp_path / "1-7").mkdir()
    announcer.announce(version, tmp_path / "1-7", sources=("http://127.0.0.1:9/weights",))
    with supervised(tmp_path, redis_url, run_id=run_id, waits=False) as server:
        server.process.wait_until(lambda: "weights.not_fetched" in log_of(server), START_S)
        status = server.wait_for(state="joining")
        assert "no source has all files of policy version 1-7" in status["reason"]
        newer = PolicyVersion(1, 8)
        announcer.announce(newer, server.checkpoint(newer))
        server.wait_for(state="serving")
        assert server.serves(newer)


def log_of(server: Supervised) -> str:
    return server.process.log_path.read_text()


def test_a_server_that_does_not_see_the_files_fetches_them_and_offers_its_copy(
    tmp_path: Path, redis_url: str
) -> None:
    (far := tmp_path / "far").mkdir()
    with supervised(tmp_path, redis_url, "--server-name", "near") as near:
        version = near.next_version()
        path = near.checkpoint(version)
        own = tmp_path / "staging" / f"grpo-{os.getuid()}-{near.announcer.run_id}-near"
        shutil.copytree(path, staged := own / path.name)  # near serves these
        url = f"{near.health_url}/weights"
        announced = described(path, version)
        (staged / MANIFEST).write_bytes((path / MANIFEST).read_bytes())
        near.announcer.announce(version, path, (url, near.weights.as_uri()))
        near.wait_for(state="serving", step=version.step)
        flags = ("--server-name", "far")
        with supervised(far, redis_url, *flags, run_id=near.announcer.run_id) as other:
            assert other.serves(version)
            status = other.status()
            assert (status["bytes"], status["dtype"]) == (announced.bytes, DTYPE)
            copy = httpx.get(f"{other.health_url}/weights/{announced.id}/model.safetensors")
            assert copy.text == f"weights of {version}"
            for bad in (f"{announced.id}/..%2f..%2fserver.log", "../server.log", "1-9/x"):
                assert httpx.get(f"{other.health_url}/weights/{bad}").status_code == 404
        with supervised(far, redis_url, *flags, run_id=near.announcer.run_id) as again:
            assert again.serves(version)


def test_an_engine_that_served_for_a_while_ends_a_series_of_failures_and_no_other() -> None:
    clock = iter((0.0, 0.0, 100.0, 100.0 + STABLE_AFTER_S, 200.0, 199.0 + STABLE_AFTER_S))
    policy = RestartPolicy(limit=2, clock=lambda: next(clock))
    for delay in (1, 1, None):
        policy.serving()
        assert policy.delay_after_failure(UNTRAINED) == delay


@pytest.mark.parametrize(
    ("limit", "served", "delays"),
    [
        (8, [(0, 0)] * 8, [1, 2, 4, 8, 16, 30, 30, None]),
        # an engine that ends after newer weights begins a new series
        (3, [(1, 0), (1, 1), (1, 1), (2, 0), (2, 0), (2, 0)], [1, 1, 2, 1, 2, None]),
    ],
)
def test_restarts_are_delayed_until_new_weights_start_over(
    limit: int, served: list[tuple[int, int]], delays: list[float | None]
) -> None:
    policy = RestartPolicy(limit)
    assert [policy.delay_after_failure(PolicyVersion(*each)) for each in served] == delays
    policy.forget()
    assert policy.delay_after_failure(PolicyVersion(*served[-1])) == 1


def test_a_first_engine_that_does_not_start_ends_the_server_with_its_status(tmp_path: Path) -> None:
    (tmp_path / BROKEN).touch()
    with supervised(tmp_path, None, waits=False) as server:
        assert server.process.wait(START_S) == 3


def test_a_late_server_of_another_data_type_ends_with_the_option(
    tmp_path: Path, redis_url: str
) -> None:
    run_id = uuid.uuid4().hex
    other = ServerStatus(name="b", state=ServerState.SERVING, epoch=1, step=5, dtype="bfloat16")
    with Redis.from_url(redis_url) as redis:
        redis.sadd(servers_key(run_id), "b")
        redis.hset(server_key(run_id, "b"), mapping=other.on_the_wire())
    with supervised(tmp_path, redis_url, run_id=run_id, waits=False) as server:
        assert server.process.wait(START_S) == 1
        told = f"in {DTYPE}, but b of run '{run_id}' serves them in bfloat16; start this server"
        assert f"{told} with --dtype bfloat16" in log_of(server)


def test_orphans_of_an_engine_are_reaped(server: Supervised) -> None:
    orphan = server.generate(orphan=True)["orphan"]
    wait_for(lambda: not psutil.pid_exists(orphan))  # a zombie exists
