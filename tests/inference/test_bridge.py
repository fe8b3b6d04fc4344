"""Trainers' sessions on a real server, and its `/bridge/*` routes."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from grpo_core.clients.inference import BridgeClient
from grpo_core.errors import ServiceUnavailable
from grpo_core.weights.bridge_config import FILE_NAME, find_bridge_config
from grpo_core.weights.socket import connect_weights
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.errors import LostServer
from tests.fixtures.inference import FLOAT32_NOISE, LEASE_S, InferenceServer
from tests.inference.request_load import posted_in_background
from tests.inference.trainer_side import (
    AttachedTrainer,
    attached_trainer,
    next_epoch,
    write_weights,
)
from tests.support.wait import wait_for

# A separate process pauses the server, reports that and never resumes.
PAUSE_AND_HANG = """
import sys, time
from pathlib import Path
from grpo_core.clients.inference import BridgeClient
from grpo_core.weights.socket import connect_weights
from grpo_core.wire.policy_version import PolicyVersion
connection = connect_weights(Path(sys.argv[2]))
bridge = BridgeClient(sys.argv[1])
epoch, step = bridge.info().policy_version
version = PolicyVersion(epoch + 1, 0)
bridge.pause(connection.grant.session, float(sys.argv[3]), version, writing=sys.argv[4] == "True")
print("paused", flush=True)
time.sleep(600)
"""


@contextmanager
def paused_by_another_process(
    server: InferenceServer, writing: bool = True
) -> Iterator[subprocess.Popen[str]]:
    arguments = [server.url, str(server.socket), str(LEASE_S), str(writing)]
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
    """Writes all weights back afterwards, as a trainer with a checkpoint does."""
    with BridgeClient(shared_server.url) as client:
        yield client
        if not client.info().weights_intact:
            write_weights(shared_server, next_epoch(shared_server))
            assert client.info().weights_intact


@pytest.mark.parametrize("writing", [False, True])
def test_after_a_trainer_was_killed_nothing_is_sampled_from_half_written_weights(
    writing: bool, shared_server: InferenceServer, bridge: BridgeClient
) -> None:
    """The closed connection ends the pause, long before the lease expires."""
    before = bridge.info().policy_version
    body: dict[str, object] = {"prompt": {"prompt_token_ids": [5, 6]}, "max_tokens": 2}
    with paused_by_another_process(shared_server, writing) as trainer:
        assert bridge.info().paused
        with posted_in_background(shared_server.url, body) as request:
            trainer.send_signal(signal.SIGKILL)
            wait_for(lambda: not bridge.info().paused)
            found = bridge.info()
            assert found.weights_intact is not writing
            assert found.policy_version == before
            if writing:
                with posted_in_background(shared_server.url, body) as later:
                    assert found.state == "awaiting_weights"
                    assert httpx.get(f"{shared_server.url}/health").status_code == 503
                    written = next_epoch(shared_server)
                    write_weights(shared_server, written)
                    assert later.result()["policy_version"] == [[list(written), list(written)]]
            expected = list(bridge.info().policy_version)
            assert request.result()["policy_version"] == [[expected, expected]]


def cut_connection(trainer: AttachedTrainer) -> None:
    """Ends the connection as if the server had ended."""
    trainer.sync._server.attachment.connection.connection.shutdown(2)


def outlive_lease(trainer: AttachedTrainer) -> None:
    version = PolicyVersion(trainer.bridge.info().policy_version[0] + 1, 0)
    trainer.bridge.pause(trainer.sync._server.attachment.session, 0.1, version)
    wait_for(lambda: not trainer.bridge.info().paused)


@pytest.mark.parametrize("lose_session", [cut_connection, outlive_lease])
def test_a_trainer_that_lost_its_session_attaches_again_and_writes_everything(
    shared_server: InferenceServer, lose_session: Callable[[AttachedTrainer], None]
) -> None:
    with attached_trainer(shared_server) as trainer:
        first = trainer.step(0).version
        lose_session(trainer)
        version = trainer.step(1).version
        assert (version > first, version.step) == (True, 2)
        assert trainer.bridge.info().weights_intact
        alignment = trainer.alignment()
        assert alignment.max < FLOAT32_NOISE < alignment.moved


def test_between_steps_a_lost_connection_is_noticed_and_the_weights_written_back(
    shared_server: InferenceServer,
) -> None:
    with attached_trainer(shared_server) as trainer:
        epoch, step = trainer.step(0).version
        cut_connection(trainer)
        trainer.sync.recover_server()
        assert trainer.bridge.info().policy_version == (epoch + 1, step)


def test_a_server_that_stays_away_is_named(shared_server: InferenceServer) -> None:
    with attached_trainer(shared_server) as trainer:
        trainer.sync._server.socket = Path("/nowhere/weights.sock")
        trainer.sync._server.return_deadline_s = 0.1
        cut_connection(trainer)
        with pytest.raises(LostServer, match=r"did not come back within 0\.1 s"):
            trainer.step(0)
        trainer.sync.close()


def info(server: InferenceServer) -> Any:
    return httpx.get(f"{server.url}/bridge/info").raise_for_status().json()


def post(server: InferenceServer, route: str, body: object = None) -> httpx.Response:
    return httpx.post(f"{server.control_url}/bridge/{route}", json=body)


def test_nothing_is_generated_during_a_pause(shared_server: InferenceServer) -> None:
    """`/health_generate` fails only after its own 5 s without a token."""
    with (
        BridgeClient(shared_server.url) as bridge,
        connect_weights(shared_server.socket) as connection,
    ):
        session, served = connection.grant.session, bridge.info().policy_version
        version = PolicyVersion(served[0] + 1, 0)
        body: dict[str, object] = {"prompt": {"prompt_token_ids": [5, 6]}, "max_tokens": 2}
        bridge.pause(session, 300.0, version)
        with posted_in_background(shared_server.url, body) as request:
            try:
                refused = httpx.get(f"{shared_server.url}/health_generate")
                assert refused.status_code == 503
                assert "no token within 5 s" in refused.json()["detail"]
                assert not request.done()
                assert info(shared_server)["state"] == "paused"
                assert httpx.get(f"{shared_server.url}/health").status_code == 200
            finally:
                bridge.resume(session, written=True)
            assert request.result()["policy_version"] == [[list(version), list(version)]]
    # The check has a deadline of 5 s, which a busy machine may exceed.
    wait_for(lambda: httpx.get(f"{shared_server.url}/health_generate").status_code == 200)


PAUSE = {"session": "unknown", "lease_s": 1, "policy_version": [1, 0]}


@pytest.mark.parametrize(
    ("route", "body", "status", "says"),
    [
        # Any client could pause the archived trainer's server; here a pause belongs to a session.
        ("pause", {}, 422, "session lease_s policy_version weight socket"),
        ("pause", PAUSE | {"lease_s": -1}, 422, "lease_s"),
        ("pause", PAUSE, 409, "not attached"),
        ("resume", {"session": "unknown", "written": True}, 409, "does not hold the pause"),
    ],
)
def test_control_requests_that_are_wrong_are_refused_with_the_reason(
    shared_server: InferenceServer, route: str, body: object, status: int, says: str
) -> None:
    answer = post(shared_server, route, body)
    assert answer.status_code == status
    assert all(word in answer.json()["detail"] for word in says.split())
    assert not info(shared_server)["paused"]


def test_an_update_notice_clears_the_prefix_cache_and_changes_no_version(
    shared_server: InferenceServer,
) -> None:
    before = info(shared_server)
    answer = post(shared_server, "notify_update").raise_for_status().json()
    assert answer["prefix_cache_reset"] is True
    noticed = before | {"notice_count": before["notice_count"] + 1}
    assert info(shared_server) == noticed
    page = {"Sec-Fetch-Site": "same-origin", "Host": "rebound.example"}
    for url in {shared_server.url, shared_server.control_url}:
        for route in ("bridge/notify_update", "v1/completions"):
            assert httpx.post(f"{url}/{route}", headers=page).status_code == 403
    assert info(shared_server) == noticed


def test_a_server_that_cannot_sleep_refuses_with_the_reason(shared_server: InferenceServer) -> None:
    answer = post(shared_server, "sleep")
    assert answer.status_code == 409
    assert "would discard the memory" in answer.json()["detail"]
    assert info(shared_server)["state"] == "serving"


def test_routes_socket_and_file_describe_the_same_weights(shared_server: InferenceServer) -> None:
    described = httpx.get(f"{shared_server.url}/bridge/state_dict_info").json()
    config = find_bridge_config(shared_server.bridge_config, {}, described["generation"])
    assert described == {**config.model_dump(mode="json"), "shared_weights_enabled": True}
    assert config.weights_socket == shared_server.socket
    assert shared_server.bridge_config.name == FILE_NAME
    for private in (shared_server.bridge_config, shared_server.socket):
        assert private.stat().st_mode & 0o777 == 0o600
    with connect_weights(shared_server.socket) as connection:
        with pytest.raises(ServiceUnavailable, match="another trainer is attached; run one"):
            connect_weights(shared_server.socket)
        assert connection.grant.manifest.parameters == config.param_mappings
        assert connection.grant.manifest.generation == config.generation
