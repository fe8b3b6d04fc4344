"""The supervisor, its sockets and Redis are real; its engine processes start in a second."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from grpo_core.handoff import Action, OutcomeState
from grpo_core.wire import PolicyVersion
from tests.support.process_table import eventually, is_alive
from tests.unit.vllm.stub_engine import BAD_RANK, DRAINS
from tests.unit.vllm.supervised import START_S, Supervised, supervised

CHECKPOINT, RESTART, LOAD = (
    *(Action.RESTART_WITH_CHECKPOINT, Action.RESTART_WITH_ADAPTER, Action.LOAD_ADAPTER),
)


def v(step: int, epoch: int = 1) -> PolicyVersion:
    return PolicyVersion(epoch, step)


def test_a_restart_keeps_requests_and_connections(tmp_path: Path, redis_url: str) -> None:
    """One request under way, one on an idle connection, one that comes while there is no engine."""
    kept = httpx.Limits(keepalive_expiry=600)  # the client's own limit is 5 s
    with (
        supervised(tmp_path, redis_url) as server,
        httpx.Client(base_url=server.url, timeout=60, limits=kept) as idle,
        ThreadPoolExecutor(1) as pool,
    ):
        before = idle.post("/generate", json={"seconds": 0}).json()
        go_on = tmp_path / "go on"
        body = {"seconds": 0, "until": str(go_on)}
        under_way = pool.submit(httpx.post, f"{server.url}/generate", json=body, timeout=60)
        server.wait_for_requests(1)
        sent = server.sender.send(CHECKPOINT, v(1), server.checkpoint("one"))
        server.wait_for(state="draining")
        other = server.sender.ask(CHECKPOINT, v(2), server.checkpoint("two"))
        assert (other.state, "under way" in other.reason) == (OutcomeState.BUSY, True)
        threading.Timer(1.0, go_on.touch).start()
        while_draining = idle.post("/generate", json={"seconds": 0}).json()
        assert under_way.result().json()["policy_version"] == [[[0, 0], [0, 0]]]
        assert under_way.result().headers["connection"] == "close"
        assert server.sender.outcome(sent).state is OutcomeState.DONE
        assert while_draining["policy_version"] == [[[1, 1], [1, 1]]]
        assert while_draining["port"] == before["port"], "the connection was closed"
        assert while_draining["pid"] != before["pid"]
        status = server.status()
        assert (status["restarts"], status["crashes"], status["dropped_requests"]) == (1, 0, 0)


def test_what_outlasts_the_drain_is_answered_503_and_counted(
    tmp_path: Path, redis_url: str
) -> None:
    with (
        supervised(tmp_path, redis_url, "--drain-s", "6") as server,
        ThreadPoolExecutor(2) as pool,
    ):
        drains = str(tmp_path / DRAINS)
        bodies: list[dict[str, Any]] = [{"seconds": 100.0}, {"seconds": 0, "until": drains}]
        answers = [
            pool.submit(httpx.post, f"{server.url}/generate", json=body, timeout=120)
            for body in bodies
        ]
        server.wait_for_requests(2)
        sent = server.sender.send(CHECKPOINT, v(1), server.checkpoint("one"))
        assert server.sender.outcome(sent).state is OutcomeState.DONE
        late, in_time = (answer.result() for answer in answers)
        assert in_time.status_code == 200
        assert late.status_code == 503
        assert "send it again" in late.json()["detail"]
        assert late.headers["retry-after"]
        assert server.status()["dropped_requests"] == 1


@pytest.mark.parametrize("flags", [(), ("--enable-lora",)])
def test_an_engine_that_crashes_comes_back_with_what_was_served_last(
    tmp_path: Path, redis_url: str, flags: tuple[str, ...]
) -> None:
    with supervised(tmp_path, redis_url, *flags) as server:
        if flags:
            assert server.sender.ask(LOAD, v(4), server.adapter("a")).state is OutcomeState.DONE
        else:
            server.sender.ask(CHECKPOINT, v(4), server.checkpoint("c"))
        engine = server.status()["engine_pid"]
        os.kill(engine, signal.SIGKILL)
        server.wait_for(state="serving", crashes=1)
        answer = server.generate()
        assert answer["policy_version"] == [[[1, 4], [1, 4]]]
        assert answer["pid"] != engine


def test_a_supervisor_that_is_killed_is_followed_by_one_that_serves_the_same(
    tmp_path: Path, redis_url: str
) -> None:
    with supervised(tmp_path, redis_url) as first:
        first.serve(CHECKPOINT, v(7), first.checkpoint("c"))
        engine = first.status()["engine_pid"]
        port = int(first.url.rpartition(":")[2])
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait(60.0)
        # Its engine goes with it, and the port is free.
        assert eventually(lambda: not is_alive(engine)), "the engine lives on"
        with supervised(tmp_path, redis_url, run_id=first.sender.run_id, port=port) as second:
            assert second.generate()["policy_version"] == [[[1, 7], [1, 7]]]


def test_what_was_served_last_and_is_gone_stops_the_start(tmp_path: Path, redis_url: str) -> None:
    with supervised(tmp_path, redis_url) as first:
        path = first.checkpoint("c")
        first.serve(CHECKPOINT, v(7), path)
    (path / "model.safetensors").write_text("something else")
    run_id = first.sender.run_id
    with supervised(tmp_path, redis_url, run_id=run_id, waits=False) as second:
        assert second.process.wait(START_S) == 1
        assert "served policy version (1, 7) last" in second.process.log_tail()
    with supervised(tmp_path, redis_url, "--no-await-weights", run_id=run_id) as third:
        assert third.generate()["policy_version"] == [[[2, 0], [2, 0]]]


def test_a_first_engine_that_does_not_start_ends_the_server(tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    with supervised(tmp_path, None, waits=False) as server:
        assert server.process.wait(START_S) == 3


def test_engines_that_keep_failing_are_given_up_and_a_command_starts_over(
    tmp_path: Path, redis_url: str
) -> None:
    with supervised(tmp_path, redis_url, "--restart-limit", "3") as server:
        server.break_engines(True)
        os.kill(server.status()["engine_pid"], signal.SIGKILL)
        status = server.wait_for(state="failed")
        assert "3 engines failed in a row" in status["reason"]
        refused = httpx.post(f"{server.url}/generate", json={"seconds": 0})
        assert refused.status_code == 503
        assert refused.json()["detail"] == status["reason"]
        assert httpx.get(f"{server.health_url}/healthz").status_code == 503
        assert server.process.exit_code is None
        server.break_engines(False)
        outcome = server.sender.ask(CHECKPOINT, v(2), server.checkpoint("two"))
        assert outcome.state is OutcomeState.DONE
        assert server.generate()["policy_version"] == [[[1, 2], [1, 2]]]
        assert httpx.get(f"{server.health_url}/healthz").status_code == 200


def test_weights_that_do_not_come_up_give_way_to_those_before(
    tmp_path: Path, redis_url: str
) -> None:
    with supervised(tmp_path, redis_url) as server:
        server.sender.ask(CHECKPOINT, v(1), server.checkpoint("good"))
        outcome = server.sender.ask(CHECKPOINT, v(2), server.checkpoint("bad", broken=True))
        assert outcome.state is OutcomeState.FAILED
        assert "before it served" in outcome.reason
        server.wait_for(state="serving")
        assert server.generate()["policy_version"] == [[[1, 1], [1, 1]]]
        # A later, whole one is served.
        assert server.sender.ask(CHECKPOINT, v(3), server.checkpoint("next")).state == "done"


def test_of_two_restarts_at_once_the_newer_wins(tmp_path: Path, redis_url: str) -> None:
    with supervised(tmp_path, redis_url) as server:
        paths = [server.checkpoint("one"), server.checkpoint("two")]
        sent = server.sender.send_at_once(CHECKPOINT, [(v(i + 1), p) for i, p in enumerate(paths)])
        outcomes = [server.sender.outcome(each) for each in sent]
        assert [found.state for found in outcomes] == [OutcomeState.BUSY, OutcomeState.DONE]
        assert "came at the same time" in outcomes[0].reason
        assert server.status()["restarts"] == 1


def refusals(server: Supervised) -> dict[str, tuple[Path, dict[str, str]]]:
    outside = server.directory / "outside"
    outside.mkdir()
    link = server.weights / "link"
    link.symlink_to(outside)
    half = server.adapter("half-written")
    (half / "adapter_model.safetensors").unlink()
    digest = {"sha256": "0" * 64}
    return {
        "not below": (outside, digest),
        "is not below": (link, digest),
        "no such directory": (server.weights / "nothing", digest),
        "not a whole adapter": (half, digest),
        "checksum": (server.adapter("other-bytes"), digest),
        "rank 64, the server accepts at most 16": (server.adapter("large", rank=64), {}),
        "not newer than (1, 1)": (server.adapter("old"), {"step": "1"}),
        "the engine does not like it": (server.adapter("bad", marker=BAD_RANK), {}),
    }


def test_bad_commands_are_refused_with_the_reason_and_change_nothing(
    tmp_path: Path, redis_url: str
) -> None:
    with supervised(tmp_path, redis_url, "--enable-lora") as server:
        server.sender.ask(LOAD, v(1), server.adapter("served"))
        for action in (LOAD, RESTART):
            for reason, (path, other) in refusals(server).items():
                if action is RESTART and "like" in reason:
                    continue  # only an engine knows
                outcome = server.sender.ask(action, v(5), path, **other)
                assert (outcome.state, reason) == (OutcomeState.REFUSED, reason)
                assert reason in outcome.reason
            for name in ("outside", "weights/link"):
                path = server.directory / name
                path.unlink() if path.is_symlink() else path.rmdir()
            for name in ("half-written", "other-bytes", "large", "old", "bad"):
                for file in (server.weights / name).iterdir():
                    file.unlink()
                (server.weights / name).rmdir()
        assert server.generate()["policy_version"] == [[[1, 1], [1, 1]]]
        assert server.status()["restarts"] == 0
        wrong_mode = server.sender.ask(CHECKPOINT, v(5), server.checkpoint("c"))
        assert "without --enable-lora" in wrong_mode.reason


def test_commands_sent_while_there_is_no_server_are_followed_when_there_is_one(
    tmp_path: Path, redis_url: str
) -> None:
    with supervised(tmp_path, redis_url) as first:
        paths = [first.checkpoint(name) for name in ("one", "two")]
    old, new = (first.sender.send(CHECKPOINT, v(i + 1), p) for i, p in enumerate(paths))
    with supervised(tmp_path, redis_url, run_id=first.sender.run_id) as second:
        assert second.sender.outcome(old).state is OutcomeState.BUSY
        # While its first engine starts, a server is busy.
        if second.sender.outcome(new).state is OutcomeState.BUSY:
            assert second.sender.ask(CHECKPOINT, v(3), paths[1]).state is OutcomeState.DONE
        second.wait_for(state="serving")


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with supervised(tmp_path, None) as first:
        port = int(first.url.rpartition(":")[2])
        with supervised(tmp_path, None, port=port, waits=False) as second:
            assert second.process.wait(START_S) == 1
            assert f"cannot listen on 127.0.0.1:{port}" in second.process.log_tail()


@pytest.mark.parametrize("before", [(), ("unshare", "--pid", "--fork", "--mount-proc")])
def test_orphans_are_reaped_as_a_plain_process_and_as_the_first_of_a_container(
    tmp_path: Path, before: tuple[str, ...]
) -> None:
    with supervised(tmp_path, None, before=before) as server:
        supervisor = psutil.Process(server.process.pid)
        if before:
            (supervisor,) = supervisor.children()
        (engine,) = supervisor.children()
        body = {"seconds": 0, "orphan": True}
        httpx.post(f"{server.url}/generate", json=body).raise_for_status()
        # The orphan has come to the supervisor by now, if only as a zombie.
        assert eventually(lambda: supervisor.children() == [engine])
        supervisor.terminate()
        assert server.process.wait(60.0) == 0
        assert not engine.is_running()


def test_sigterm_ends_everything(tmp_path: Path, redis_url: str) -> None:
    with supervised(tmp_path, redis_url) as server:
        engine = server.status()["engine_pid"]
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(60.0) == 0
        assert not psutil.pid_exists(engine)
