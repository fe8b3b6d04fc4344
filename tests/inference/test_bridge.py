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

from grpo_core.errors import RequestRefused, ServiceUnavailable
from grpo_core.inference_client import BridgeClient
from grpo_core.weight_socket import WeightConnection, connect_weights
from grpo_core.wire import PolicyVersion
from grpo_trainer.errors import LostServer, TornWeights
from grpo_trainer.weight_sync.attachment import WeightPlaces
from grpo_trainer.weight_sync.shared_vllm import SharedVllm
from tests.fixtures.inference import InferenceServer
from tests.inference.engine_load import in_time, posted_in_background, wait_for
from tests.inference.trainer_side import (
    FLIGHT_TOKENS,
    FLIGHTS,
    AttachedTrainer,
    attached_trainer,
    update_in_flight,
)

LEASE_S = 120.0
"""Longer than anything here takes."""
SHORT_LEASE_S = 2.0

# Pauses in a process of its own, says so, and never resumes.
PAUSE_AND_HANG = """
import sys, time
from pathlib import Path
from grpo_core.inference_client import BridgeClient
from grpo_core.weight_socket import connect_weights
from grpo_core.wire import PolicyVersion
connection = connect_weights(Path(sys.argv[2]))
bridge = BridgeClient(sys.argv[1])
epoch, step = bridge.info().policy_version
bridge.pause(connection.grant.session, float(sys.argv[3]), PolicyVersion(epoch + 1, 0))
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


def next_version(bridge: BridgeClient) -> PolicyVersion:
    epoch, _ = bridge.info().policy_version
    return PolicyVersion(epoch + 1, 0)


def write_everything_again(server: InferenceServer, bridge: BridgeClient) -> None:
    """What a trainer with a checkpoint does after the one before was cut off."""
    with connect_weights(server.socket) as connection:
        session = connection.grant.session
        bridge.pause(session, 30.0, next_version(bridge))
        bridge.resume(session, written=True)
    assert bridge.info().weights_intact


def test_a_trainer_killed_between_pause_and_resume_does_not_leave_the_server_paused(
    shared_server: InferenceServer, bridge: BridgeClient
) -> None:
    """Long before its lease runs out: the kernel closes a dead process's connection."""
    before = bridge.info().policy_version
    with hanging_trainer(shared_server, LEASE_S) as trainer:
        assert bridge.info().paused
        trainer.send_signal(signal.SIGKILL)
        wait_for(lambda: not bridge.info().paused, LEASE_S / 2)
    assert bridge.sample([1, 2, 3], max_tokens=2).token_ids
    # The write may have been cut in half, so what is served has a name that nobody chose.
    assert bridge.info().policy_version == (before[0] + 1, before[1])
    assert not bridge.info().weights_intact
    own_bridge = BridgeClient(shared_server.url)
    sync = SharedVllm(own_bridge, str(shared_server.model), None, "auto", lease_s=5.0)
    with pytest.raises(TornWeights, match="may hold half an update"):
        sync.load_policy()
    sync.close()
    write_everything_again(shared_server, bridge)


def test_a_trainer_that_hangs_loses_its_lease_and_cannot_resume_later(
    shared_server: InferenceServer, bridge: BridgeClient
) -> None:
    with hanging_trainer(shared_server, lease_s=1.0):  # has paused: it says so
        wait_for(lambda: not bridge.info().paused)
        assert not bridge.info().weights_intact
    write_everything_again(shared_server, bridge)


def test_a_lease_that_ran_out_is_not_resumed_or_renewed(
    shared_server: InferenceServer, bridge: BridgeClient
) -> None:
    with connect_weights(shared_server.socket) as connection:
        session = connection.grant.session
        bridge.pause(session, 0.2, next_version(bridge))
        wait_for(lambda: not bridge.info().paused)
        served = bridge.info().policy_version
        with pytest.raises(RequestRefused, match="does not hold the pause: its lease ran out"):
            bridge.resume(session, written=True)
        with pytest.raises(RequestRefused, match="is not attached to this server"):
            bridge.pause(session, 5.0, next_version(bridge))
        assert bridge.info().policy_version == served
    write_everything_again(shared_server, bridge)


def test_asking_again_extends_the_lease(
    shared_server: InferenceServer, bridge: BridgeClient
) -> None:
    assert in_time(lambda: outlives_its_first_lease(shared_server, bridge))


def outlives_its_first_lease(server: InferenceServer, bridge: BridgeClient) -> bool | None:
    """A pause that is asked for again. None where that was after its end."""
    with connect_weights(server.socket) as connection:
        session, version = connection.grant.session, next_version(bridge)
        asked_at = time.monotonic()
        bridge.pause(session, SHORT_LEASE_S, version)
        try:
            bridge.pause(session, LEASE_S, version)
        except RequestRefused:
            if time.monotonic() - asked_at < SHORT_LEASE_S:
                raise
        else:
            time.sleep(SHORT_LEASE_S + 0.5)
            outlives = bridge.info().paused
            bridge.resume(session, written=False)
            assert not bridge.info().paused
            return outlives
    write_everything_again(server, bridge)
    return None


def test_requests_in_flight_survive_a_pause_and_say_which_versions_sampled_them(
    shared_server: InferenceServer,
) -> None:
    with attached_trainer(shared_server, lr=1e-4) as trainer:
        trainer.step(0)
        update = in_time(lambda: update_in_flight(shared_server, trainer, [5, 6, 7]))
    before, after, reply = update.before, update.after, update.reply
    assert after == (before.epoch, before.step + 1)
    assert [len(tokens) for tokens in reply["token_ids"]] == [FLIGHT_TOKENS] * FLIGHTS
    assert reply["policy_version"] == [[list(before), list(after)]] * FLIGHTS


def test_nothing_is_generated_during_a_pause(
    shared_server: InferenceServer, bridge: BridgeClient, connection: WeightConnection
) -> None:
    session = connection.grant.session
    body = {"prompt": {"prompt_token_ids": [5, 6]}, "max_tokens": 2, "logprobs": 0}
    version = next_version(bridge)
    bridge.pause(session, 30.0, version)
    with posted_in_background(shared_server.url, body) as posted:
        time.sleep(0.5)
        bridge.resume(session, written=True)
        assert posted.answer()["policy_version"] == [[list(version), list(version)]]


def test_sessions_that_the_server_does_not_know_are_refused(bridge: BridgeClient) -> None:
    with pytest.raises(RequestRefused, match="is not attached to this server"):
        bridge.pause("unknown", 1.0, next_version(bridge))
    with pytest.raises(RequestRefused, match="does not hold the pause"):
        bridge.resume("unknown", written=True)


def test_a_second_trainer_is_refused_while_one_is_attached(
    shared_server: InferenceServer, connection: WeightConnection
) -> None:
    assert connection.grant.session
    with pytest.raises(ServiceUnavailable, match="another trainer is attached to this server"):
        connect_weights(shared_server.socket)
    assert not connection.server_has_closed()


def test_a_trainer_that_follows_another_is_let_in(shared_server: InferenceServer) -> None:
    sessions = set()
    for _ in range(3):
        with connect_weights(shared_server.socket) as connection:
            sessions.add(connection.grant.session)
    assert len(sessions) == 3


def test_a_version_names_one_set_of_weights_only(
    bridge: BridgeClient, connection: WeightConnection
) -> None:
    """Judged before anything is written."""
    served = PolicyVersion(*bridge.info().policy_version)
    with pytest.raises(RequestRefused, match="is not newer than"):
        bridge.pause(connection.grant.session, 30.0, served)
    assert not bridge.info().paused


def test_an_update_given_up_before_it_wrote_keeps_the_version(
    bridge: BridgeClient, connection: WeightConnection
) -> None:
    served = bridge.info().policy_version
    bridge.pause(connection.grant.session, 30.0, next_version(bridge))
    bridge.resume(connection.grant.session, written=False)
    assert bridge.info().policy_version == served
    assert bridge.info().weights_intact


def test_a_trainer_that_lost_its_connection_attaches_again_and_writes_everything(
    shared_server: InferenceServer,
) -> None:
    with attached_trainer(shared_server) as trainer:
        epoch, _ = trainer.step(0).version
        cut_connection(trainer)
        trainer.sync.tend()
        assert trainer.bridge.info().policy_version == (epoch + 1, 1)
        cut_connection(trainer)
        assert trainer.step(1).version == (epoch + 2, 2)
        assert trainer.bridge.info().weights_intact
        alignment = trainer.alignment()
        assert alignment.max < 1e-4 < alignment.moved


def test_a_session_that_ended_at_the_server_is_replaced(shared_server: InferenceServer) -> None:
    """A trainer that slept through its lease finds out when it pauses again."""
    with attached_trainer(shared_server) as trainer:
        epoch, _ = trainer.step(0).version
        attachment = trainer.sync._hold.attachment
        trainer.bridge.pause(attachment.session, 0.1, PolicyVersion(epoch, 2))
        wait_for(lambda: not trainer.bridge.info().paused)
        assert trainer.step(1).version == (epoch + 2, 2)
        assert trainer.alignment().max < 1e-4


def test_a_server_that_stays_away_is_named(shared_server: InferenceServer) -> None:
    with attached_trainer(shared_server) as trainer:
        trainer.sync._hold._places = WeightPlaces(Path("/nowhere/weights.sock"))
        trainer.sync._hold.return_deadline_s = 0.5
        cut_connection(trainer)
        with pytest.raises(LostServer, match=r"did not come back within 0\.5 s"):
            trainer.step(0)
        trainer.sync.close()


def cut_connection(trainer: AttachedTrainer) -> None:
    """What the end of the server looks like from the trainer."""
    trainer.sync._hold.attachment.connection.connection.shutdown(2)


def test_the_socket_is_private(shared_server: InferenceServer) -> None:
    assert Path(shared_server.socket).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("pause", {}),
        ("pause", {"session": "s", "lease_s": -1, "policy_version": [1, 0]}),
        ("pause", {"session": "s", "lease_s": "soon", "policy_version": [1, 0]}),
        ("pause", {"session": "s", "lease_s": 1, "policy_version": [1]}),
        ("pause", {"session": "s", "lease_s": 1, "policy_version": [-1, 0]}),
        ("pause", {"session": "s", "lease_s": 1, "policy_version": [1, 0], "mode": "abort"}),
        ("resume", {"session": "s"}),
        ("resume", {"session": "s", "written": "perhaps"}),
    ],
)
def test_malformed_control_requests_are_refused(
    shared_server: InferenceServer, route: str, body: dict[str, object]
) -> None:
    answer = httpx.post(f"{shared_server.url}/bridge/{route}", json=body)
    assert 400 <= answer.status_code < 500
