"""The supervisor with real sockets and a real Redis; its stand-in engines start in a second.

Most tests share one supervisor, in any order: each publishes its own weights and compares counters
with their previous values.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from redis import Redis

from grpo_core.weights.ref import UNTRAINED
from grpo_core.weights.supervisor import Action, OutcomeState, commands_key
from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.supervisor.supervisor import STABLE_AFTER_S, RestartPolicy
from tests.support.process_table import is_alive
from tests.support.wait import wait_for
from tests.unit.vllm.stub_engine import BAD_RANK, BROKEN, HELD, OBSTACLE
from tests.unit.vllm.supervised import CHECKPOINT, LOAD, START_S, Supervised, supervised

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
        sent = server.sender.send(CHECKPOINT, version, server.checkpoint("drained-for"))
        server.wait_for(state="draining")
        wait_for(lambda: drains() > drained)  # the supervisor reports it before the engine is told
        idle.request("POST", "/generate", "{}")
        go_on.touch()
        assert under_way.result().json()["pid"] == engine
        assert under_way.result().headers["connection"] == "close"
        assert port_seen_by_the_engine() == port, "the connection was closed"
    assert server.sender.outcome(sent).state is OutcomeState.DONE
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
    version, host, engine = lora.publish(LOAD), lora.host, lora.status()["engine_pid"]
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


def test_engines_that_keep_failing_are_given_up_until_a_command_asks_again(
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


def test_of_two_commands_at_once_the_newer_wins_and_a_later_one_finds_it_under_way(
    server: Supervised, tmp_path: Path
) -> None:
    """The restart lasts as long as a request is in flight."""
    restarts, go_on = server.count("restarts"), tmp_path / "go on"
    versions = [server.next_version() for _ in range(3)]
    weights = [(version, server.checkpoint(f"rival-{version.step}")) for version in versions]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(server.post, until=str(go_on))
        server.wait_for_requests(1)
        older, newer = server.sender.send_at_once(CHECKPOINT, weights[:2])
        server.wait_for(state="draining")
        later = server.sender.ask(CHECKPOINT, *weights[2])
        go_on.touch()
    replaced = server.sender.outcome(older)
    assert (replaced.state, "arrived at the same time" in replaced.reason) == (
        OutcomeState.BUSY,
        True,
    )
    assert (later.state, "in progress" in later.reason) == (OutcomeState.BUSY, True)
    assert server.sender.outcome(newer).state is OutcomeState.DONE
    assert server.serves(versions[1])
    assert server.count("restarts") == restarts + 1


def test_bad_commands_are_refused_with_the_reason_and_change_nothing(lora: Supervised) -> None:
    served, restarts = lora.publish(LOAD), lora.count("restarts")
    version = lora.next_version()
    with Redis.from_url(lora.sender.redis_url) as redis:
        redis.xadd(commands_key(lora.sender.run_id), {b"id": b"\xff"})
    (link := lora.weights / "link").symlink_to(lora.directory)
    digest, large = {"sha256": "0" * 64}, lora.adapter("large", rank=64)
    refusals: list[tuple[str, Path, dict[str, str]]] = [
        ("is not in", link, digest),
        ("checksum", lora.adapter("other-bytes"), digest),
        ("the adapter has rank 64, but the server accepts at most 16", large, {}),
        ("not newer than", lora.adapter("old"), {"step": str(served.step)}),
    ]
    for reason, path, other in refusals:
        for action in (LOAD, Action.RESTART_WITH_ADAPTER):
            outcome = lora.sender.ask(action, version, path, **other)
            assert (outcome.state, reason) == (OutcomeState.REFUSED, reason)
            assert reason in outcome.reason
    only_an_engine_sees = lora.adapter("bad", **{BAD_RANK: ""})
    outcome = lora.sender.ask(LOAD, version, only_an_engine_sees)
    assert (outcome.state, outcome.reason) == (OutcomeState.REFUSED, "the engine does not like it")
    wrong_mode = lora.sender.ask(CHECKPOINT, version, lora.checkpoint("c"))
    assert "without --enable-lora" in wrong_mode.reason
    assert lora.serves(served)
    assert lora.count("restarts") == restarts


def test_a_killed_supervisor_ends_its_engine_and_the_next_one_serves_the_same(
    tmp_path: Path, redis_url: str
) -> None:
    with supervised(tmp_path, redis_url) as first:
        version = first.publish()
        gone = [first.host.pid, first.status()["engine_pid"]]
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait(START_S)
        for pid in gone:
            wait_for(lambda pid=pid: not is_alive(pid))
    weights = [(first.next_version(), first.checkpoint(name)) for name in ("older", "newer")]
    older, newer = (first.sender.send(CHECKPOINT, *each) for each in weights)
    again = {"run_id": first.sender.run_id, "port": first.port}
    (tmp_path / HELD).touch()
    with supervised(tmp_path, redis_url, **again, waits=False) as second:
        assert "at the same time" in second.sender.outcome(older).reason
        assert "the server is starting" in second.sender.outcome(newer).reason
        (tmp_path / HELD).unlink()
        second.wait_for(state="serving")
        assert second.serves(version)
        assert second.sender.ask(CHECKPOINT, *weights[1]).state is OutcomeState.DONE
        engine = second.status()["engine_pid"]
        second.process.signal(signal.SIGTERM)
        assert second.process.wait(START_S) == 0
        assert not psutil.pid_exists(engine)


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
def test_restarts_are_delayed_until_a_command_starts_over(
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


def test_orphans_of_an_engine_are_reaped(server: Supervised) -> None:
    orphan = server.generate(orphan=True)["orphan"]
    wait_for(lambda: not psutil.pid_exists(orphan))  # a zombie exists
