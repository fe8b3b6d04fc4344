"""The process that engines are forked from, under a real supervisor."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
from pathlib import Path

import psutil
import pytest

from grpo_core.handoff import Action, OutcomeState
from grpo_core.wire import PolicyVersion
from grpo_vllm import host_packets
from grpo_vllm.engine_plan import EnginePlan
from tests.support.process_table import eventually, is_alive
from tests.unit.vllm.stub_engine import OBSTACLE
from tests.unit.vllm.supervised import Supervised, supervised

FIRST = PolicyVersion(1, 1)
MANY = 2 * host_packets._DESCRIPTORS_PER_PACKET + 1


def restart(server: Supervised, version: PolicyVersion) -> None:
    path = server.checkpoint(f"step-{version.step}")
    outcome = server.sender.ask(Action.RESTART_WITH_CHECKPOINT, version, path)
    assert outcome.state is OutcomeState.DONE, outcome


def host_of(server: Supervised) -> psutil.Process:
    host = psutil.Process(server.status()["engine_pid"]).parent()
    assert host is not None
    assert host.ppid() == server.process.pid
    return host


def test_engines_are_forked_from_one_host(tmp_path: Path, redis_url: str) -> None:
    with supervised(tmp_path, redis_url) as server:
        host = host_of(server)
        restart(server, FIRST)
        assert host_of(server) == host
        os.kill(server.status()["engine_pid"], signal.SIGKILL)
        server.wait_for(state="serving", crashes=1)
        assert host_of(server) == host


def test_a_host_that_is_killed_takes_its_engine_along_and_both_are_replaced(
    tmp_path: Path, redis_url: str
) -> None:
    with supervised(tmp_path, redis_url) as server:
        restart(server, FIRST)
        host, engine = host_of(server), server.status()["engine_pid"]
        host.kill()
        server.wait_for(state="serving", crashes=1)
        answer = server.generate()
        assert answer["policy_version"] == [[list(FIRST), list(FIRST)]]
        assert answer["pid"] != engine
        assert host_of(server) != host
        assert not psutil.pid_exists(engine), "nobody has reaped it"


def test_an_engine_that_cannot_be_forked_is_started_anew(tmp_path: Path, redis_url: str) -> None:
    with supervised(tmp_path, redis_url, environment={OBSTACLE: "it has threads"}) as server:
        engine = psutil.Process(server.status()["engine_pid"])
        assert engine.cmdline()[1:3] == ["-m", "tests.unit.vllm.stub_engine"]
        restart(server, FIRST)
        assert server.generate()["policy_version"] == [[list(FIRST), list(FIRST)]]
        assert "it has threads" in (tmp_path / "server.log").read_text()


def test_more_connections_than_a_packet_takes_are_kept(tmp_path: Path, redis_url: str) -> None:
    with supervised(tmp_path, redis_url) as server, contextlib.ExitStack() as stack:
        port = int(server.url.rpartition(":")[2])
        clients = [
            stack.enter_context(
                contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60))
            )
            for _ in range(MANY)
        ]
        before = [answered(client) for client in clients]
        restart(server, FIRST)
        assert [answered(client) for client in clients] == before


def answered(client: http.client.HTTPConnection) -> int:
    """The client's port as the server sees it: the same for the same connection."""
    client.request("POST", "/generate", '{"seconds": 0}')
    port: int = json.loads(client.getresponse().read())["port"]
    return port


def test_a_plan_arrives_with_the_receivers_own_descriptors() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(5)]
    plan = EnginePlan(
        channel=files[0], public=files[1], private=files[2], control=files[3], parked=(files[4],)
    )
    with ours, theirs:
        host_packets.send_plan(ours, plan)
        received = host_packets.receive_plan(theirs)
        assert received is not None
        assert not set(received.descriptors()) & set(files)
        assert received.control is not None
        assert received.weights == plan.weights
        ours.close()
        assert host_packets.receive_plan(theirs) is None
    for descriptor in (*files, *received.descriptors()):
        os.close(descriptor)


@pytest.mark.parametrize("control", [None, 3])
def test_descriptors_are_renumbered_in_their_own_order(control: int | None) -> None:
    plan = EnginePlan(channel=0, public=1, private=2, control=control, parked=(5, 6))
    numbers = tuple(range(100, 100 + len(plan.descriptors())))
    new = plan.renumbered(numbers)
    assert new.descriptors() == numbers
    assert (new.channel, new.public, new.private) == numbers[:3]
    assert new.parked == numbers[-2:]


def test_the_host_ends_with_its_supervisor(tmp_path: Path) -> None:
    with supervised(tmp_path, None) as server:
        host = host_of(server)
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(60.0)
        assert eventually(lambda: not is_alive(host.pid))
