"""Who may stop the server, for how long, and what happens when the trainer dies meanwhile."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from grpo_core.errors import RequestRefused
from grpo_core.inference_client import BridgeClient
from grpo_core.weight_socket import WeightConnection, connect_weights
from grpo_core.wire import PolicyVersion
from grpo_trainer.errors import LostServer
from tests.fixtures.inference import InferenceServer
from tests.integration.engine_load import posted_in_background, running_requests, wait_for
from tests.integration.trainer_side import attached_trainer

# Pauses in a process of its own, says so, and never resumes.
PAUSE_AND_HANG = """
import sys, time
from pathlib import Path
from grpo_core.inference_client import BridgeClient
from grpo_core.weight_socket import connect_weights
connection = connect_weights(Path(sys.argv[2]))
BridgeClient(sys.argv[1]).pause(connection.grant.session, lease_s=float(sys.argv[3]))
print("paused", flush=True)
time.sleep(600)
"""


@contextmanager
def hanging_trainer(server: InferenceServer, lease_s: float) -> Iterator[subprocess.Popen[str]]:
    """A trainer process that holds the pause."""
    arguments = [server.url, str(server.socket), str(lease_s)]
    process = subprocess.Popen(
        [sys.executable, "-c", PAUSE_AND_HANG, *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "paused\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def bridge(shared_server: InferenceServer) -> Iterator[BridgeClient]:
    with BridgeClient(shared_server.url) as client:
        yield client


@pytest.fixture
def connection(shared_server: InferenceServer) -> Iterator[WeightConnection]:
    with connect_weights(shared_server.socket) as connection:
        yield connection


def test_a_trainer_killed_between_pause_and_resume_does_not_leave_the_server_paused(
    shared_server: InferenceServer, bridge: BridgeClient
) -> None:
    """Long before the lease of a minute: the kernel closes a dead process's connection."""
    before = bridge.info().policy_version
    with hanging_trainer(shared_server, lease_s=60.0) as trainer:
        assert bridge.info().paused
        trainer.send_signal(signal.SIGKILL)
        wait_for(lambda: not bridge.info().paused, deadline_s=5.0)
    assert bridge.sample([1, 2, 3], max_tokens=2).token_ids
    # The write may have been cut in half, so what is served has a name that nobody chose.
    assert bridge.info().policy_version == (before[0] + 1, before[1])


def test_a_trainer_that_hangs_loses_its_lease_and_cannot_resume_later(
    bridge: BridgeClient, connection: WeightConnection
) -> None:
    session = connection.grant.session
    bridge.pause(session, lease_s=1.0)
    assert bridge.info().paused
    wait_for(lambda: not bridge.info().paused, deadline_s=5.0)
    version = PolicyVersion(*bridge.info().policy_version)
    with pytest.raises(RequestRefused, match="does not hold the pause: its lease ran out"):
        bridge.resume(session, PolicyVersion(version.epoch + 1, 0))
    assert bridge.info().policy_version == version


def test_asking_again_extends_the_lease(bridge: BridgeClient, connection: WeightConnection) -> None:
    session = connection.grant.session
    bridge.pause(session, lease_s=1.0)
    bridge.pause(session, lease_s=30.0)
    time.sleep(1.5)
    assert bridge.info().paused
    bridge.resume(session, None)
    assert not bridge.info().paused


def test_requests_in_flight_survive_a_pause_and_say_which_versions_sampled_them(
    shared_server: InferenceServer,
) -> None:
    body = {
        "prompt": {"prompt_token_ids": [5, 6, 7]},
        "n": 16,
        "max_tokens": 400,
        "ignore_eos": True,
        "logprobs": 0,
    }
    with attached_trainer(shared_server, lr=1e-4) as trainer:
        before = trainer.step(0).version
        trainer.gather_gradient(1)
        with posted_in_background(shared_server.url, body) as answer:
            wait_for(lambda: running_requests(shared_server) > 0, deadline_s=10.0)
            after = trainer.sync.apply(trainer.optimizer, 1).version
            reply = answer()
    assert after == (before.epoch, 2)
    assert [len(tokens) for tokens in reply["token_ids"]] == [400] * 16
    assert reply["policy_version"] == [[list(before), list(after)]] * 16


def test_nothing_is_generated_during_a_pause(
    shared_server: InferenceServer, bridge: BridgeClient, connection: WeightConnection
) -> None:
    session = connection.grant.session
    body = {"prompt": {"prompt_token_ids": [5, 6]}, "max_tokens": 2, "logprobs": 0}
    bridge.pause(session, lease_s=30.0)
    with posted_in_background(shared_server.url, body) as answer:
        time.sleep(0.5)
        version = PolicyVersion(*bridge.info().policy_version)
        newer = PolicyVersion(version.epoch + 1, 7)
        bridge.resume(session, newer)
        assert answer()["policy_version"] == [[list(newer), list(newer)]]


def test_sessions_that_the_server_does_not_know_are_refused(bridge: BridgeClient) -> None:
    with pytest.raises(RequestRefused, match="is not attached to this server"):
        bridge.pause("unknown", lease_s=1.0)
    with pytest.raises(RequestRefused, match="does not hold the pause"):
        bridge.resume("unknown", None)


def test_a_second_trainer_cannot_take_the_pause_over(
    shared_server: InferenceServer, bridge: BridgeClient, connection: WeightConnection
) -> None:
    bridge.pause(connection.grant.session, lease_s=30.0)
    with (
        connect_weights(shared_server.socket) as second,
        pytest.raises(RequestRefused, match="another trainer holds the pause"),
    ):
        bridge.pause(second.grant.session, lease_s=1.0)
    assert bridge.info().paused
    bridge.resume(connection.grant.session, None)


def test_a_version_names_one_set_of_weights_only(
    bridge: BridgeClient, connection: WeightConnection
) -> None:
    session = connection.grant.session
    version = PolicyVersion(*bridge.info().policy_version)
    bridge.pause(session, lease_s=30.0)
    with pytest.raises(RequestRefused, match="is not newer than"):
        bridge.resume(session, version)
    bridge.resume(session, None)
    assert bridge.info().policy_version == version


def test_a_trainer_notices_a_server_that_is_gone(shared_server: InferenceServer) -> None:
    with attached_trainer(shared_server) as trainer:
        connection = trainer.sync._connection
        assert connection is not None
        assert not connection.server_has_closed()
        connection.connection.shutdown(2)  # what the end of the server looks like from here
        with pytest.raises(LostServer, match="gone or restarted"):
            trainer.step(0)
        trainer.sync.close()


def test_the_socket_is_private(shared_server: InferenceServer) -> None:
    assert Path(shared_server.socket).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("pause", {}),
        ("pause", {"session": "s", "lease_s": -1}),
        ("pause", {"session": "s", "lease_s": "soon"}),
        ("pause", {"session": "s", "lease_s": 1, "mode": "abort"}),
        ("resume", {"session": "s", "policy_version": [1]}),
        ("resume", {"session": "s", "policy_version": [-1, 0]}),
    ],
)
def test_malformed_control_requests_are_refused(
    shared_server: InferenceServer, route: str, body: dict[str, object]
) -> None:
    answer = httpx.post(f"{shared_server.url}/bridge/{route}", json=body)
    assert 400 <= answer.status_code < 500
