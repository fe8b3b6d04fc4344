"""Trainers' sessions on a real server: one at a time, and a trainer that dies cannot block it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from grpo_core.clients.inference import BridgeClient
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.errors import LostServer
from tests.fixtures.inference import FLOAT32_NOISE, LEASE_S, InferenceServer
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
bridge.pause(connection.grant.session, float(sys.argv[3]), PolicyVersion(epoch + 1, 0))
print("paused", flush=True)
time.sleep(600)
"""


@contextmanager
def paused_by_another_process(server: InferenceServer) -> Iterator[subprocess.Popen[str]]:
    arguments = [server.url, str(server.socket), str(LEASE_S)]
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


def test_a_trainer_killed_during_its_pause_leaves_a_serving_server_with_torn_weights(
    shared_server: InferenceServer, bridge: BridgeClient
) -> None:
    """The closed connection ends the pause, long before the lease expires."""
    before = bridge.info().policy_version
    with paused_by_another_process(shared_server) as trainer:
        assert bridge.info().paused
        trainer.send_signal(signal.SIGKILL)
        wait_for(lambda: not bridge.info().paused)
    assert bridge.sample([1, 2, 3], max_tokens=2).token_ids
    # The weights may be torn, so their version is one that no trainer has used.
    assert bridge.info().policy_version == (before[0] + 1, before[1])
    assert not bridge.info().weights_intact


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
        epoch, _ = trainer.step(0).version
        lose_session(trainer)
        version = trainer.step(1).version
        assert version.epoch > epoch
        assert version.step == 2
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
