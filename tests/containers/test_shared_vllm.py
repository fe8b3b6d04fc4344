"""Mode `shared_vllm` from start to end, while its server is killed and Redis is restarted."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.stack import NOISE, TEST_WITHIN_S, Stack, docker, own_ports

STEPS = 12
KILLED_AFTER_STEPS, RESTARTED_AFTER_STEPS = 4, 7
MORE_STEPS = 2
CONTAINER_USER = 1000

pytestmark = pytest.mark.timeout(TEST_WITHIN_S)


@pytest.fixture(scope="module")
def finished(stack_settings: dict[str, str]) -> Iterator[Stack]:
    """It has trained to the end, with a dead server and a restarted Redis in between."""
    shared_memory = in_shared_memory()
    own = own_ports() | {"STEPS": str(STEPS)}
    stack = Stack("shared_vllm", "grpo-test-shared", stack_settings | own)
    try:
        stack.up_well()
        stack.wait_until(lambda: stack.steps() >= KILLED_AFTER_STEPS)
        os.kill(int(stack.inspect("vllm-server")["State"]["Pid"]), signal.SIGKILL)
        stack.wait_until(lambda: stack.steps() >= RESTARTED_AFTER_STEPS)
        docker("restart", "--time", "60", stack.container("redis"))
        stack.wait_for_the_end()
        yield stack
    finally:
        stack.down()
    assert in_shared_memory() <= shared_memory


def in_shared_memory() -> set[str]:
    """What users of containers have there."""
    return {path.name for path in Path("/dev/shm").iterdir() if owner(path) == CONTAINER_USER}


def owner(path: Path) -> int | None:
    try:
        return path.stat().st_uid
    except FileNotFoundError:  # gone since it was listed
        return None


def test_every_step_is_served_though_the_server_was_killed(finished: Stack, tmp_path: Path) -> None:
    assert finished.restarts() == {"vllm-server": 1, "trainer": 0, "environment": 0}
    made = finished.fetch(tmp_path)
    assert (tmp_path / "shared_vllm" / "final_model" / "model.safetensors").is_file()
    assert [record["step"] for record in made] == list(range(1, STEPS + 1))
    probed = {r["step"]: r for r in made if "alignment/probe_max" in r}
    assert list(probed) == [1, 10]  # before the kill and after it
    assert all(record["alignment/probe_max"] < NOISE for record in probed.values())
    assert min(record["alignment/probe_moved"] for record in probed.values()) > 100 * NOISE
    # The server that came back has answered nobody with the checkpoint.
    after = made[KILLED_AFTER_STEPS:]
    assert {record["staleness/other_epoch_fraction"] for record in after} == {0.0}


def test_server_and_trainer_reap_their_children(finished: Stack) -> None:
    """Though they are not the first process of their namespace, of which tini would warn."""
    assert "Tini is not running as PID 1" not in finished.logs(tail=1000)


def test_wait_shows_rewards_and_ends_with_the_trainers_status(finished: Stack) -> None:
    done = finished.make("wait")
    assert done.returncode == 0
    assert f"step {STEPS}/{STEPS}  reward 0." in done.stdout
    assert "trainer-shared ended with status 0" in done.stdout


def test_a_complete_run_goes_on_with_more_steps(finished: Stack, tmp_path: Path) -> None:
    # Compose leaves alone what runs when it looks.
    finished.wait_until(lambda: not finished.inspect("environment")["State"]["Running"])
    finished.up_well(STEPS=str(STEPS + MORE_STEPS))
    finished.wait_for_the_end()
    steps = [record["step"] for record in finished.fetch(tmp_path)]
    assert steps == list(range(1, STEPS + MORE_STEPS + 1))
