"""Mode `shared_vllm` from start to end, while its server is killed and Redis is restarted."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.containers.stack import SERVICES, TEST_WITHIN_S, Stack, docker

STEPS = 60
WINDOW = 15
MIN_RISE = 0.04
"""Of the mean reward, last 15 steps over first 15: seen 0.15, with a standard error of 0.024."""
MORE_STEPS = 2
KILLED_AFTER_STEPS = 10
RESTARTED_AFTER_STEPS = 25
FIRST_STEPS_WITHIN_S = 1800
RUN_WITHIN_S = 1800
CONTAINER_USER = 1000
PORTS = {"RUN_API_PORT": "18000", "VLLM_PORT": "19001"}

pytestmark = pytest.mark.timeout(TEST_WITHIN_S)


@pytest.fixture(scope="module")
def stack(stack_settings: dict[str, str]) -> Iterator[Stack]:
    """Up, with a trainer that trains."""
    shared_memory = in_shared_memory()
    stack = Stack(
        "shared_vllm", "grpo-test-shared", {**stack_settings, **PORTS, "STEPS": str(STEPS)}
    )
    try:
        stack.up_well()
        yield stack
    finally:
        stack.down()
    assert stack.left_behind() == []
    assert in_shared_memory() <= shared_memory


def in_shared_memory() -> set[str]:
    """What users of containers have there."""
    return {path.name for path in Path("/dev/shm").iterdir() if owner(path) == CONTAINER_USER}


def owner(path: Path) -> int | None:
    try:
        return path.stat().st_uid
    except FileNotFoundError:  # gone since it was listed
        return None


@pytest.fixture(scope="module")
def finished(stack: Stack) -> Stack:
    """It has trained to the end, with a dead server and a restarted Redis in between."""
    wait_for_steps(stack, KILLED_AFTER_STEPS)
    os.kill(stack.pid("vllm-server"), signal.SIGKILL)
    wait_for_steps(stack, RESTARTED_AFTER_STEPS)
    docker("restart", "--time", "60", stack.container("redis"))
    assert stack.wait_for_the_trainer(RUN_WITHIN_S) == 0, stack.logs()
    return stack


def wait_for_steps(stack: Stack, steps: int) -> None:
    stack.wait_until(lambda: stack.steps() >= steps, FIRST_STEPS_WITHIN_S, f"{steps} steps")


@pytest.mark.parametrize("service", SERVICES)
def test_containers_are_confined(stack: Stack, service: str) -> None:
    found = stack.inspect(service)
    host = found["HostConfig"]
    assert found["Config"]["User"] == "1000:1000"
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    assert not host["CapAdd"]
    assert not host["Privileged"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert all("docker.sock" not in mount["Source"] for mount in found["Mounts"])
    published = [at for ports in (host["PortBindings"] or {}).values() for at in ports]
    assert all(at["HostIp"] == "127.0.0.1" for at in published)


def test_the_run_finishes_though_its_server_was_killed(finished: Stack) -> None:
    assert finished.restarts("vllm-server") == 1
    assert finished.restarts("trainer") == 0


def records(stack: Stack, directory: Path) -> list[dict[str, Any]]:
    """What the trainer has written of each step; its files are below `directory` then."""
    fetched = stack.make("fetch-checkpoint", TO=str(directory))
    assert fetched.returncode == 0, fetched.stderr
    lines = (directory / "shared_vllm" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_reward_has_risen(finished: Stack, tmp_path: Path) -> None:
    made = records(finished, tmp_path)
    assert (tmp_path / "shared_vllm" / "final_model" / "model.safetensors").is_file()
    assert [record["step"] for record in made] == list(range(1, STEPS + 1))
    rewards = [record["reward/mean"] for record in made]
    first, last = (sum(part) / WINDOW for part in (rewards[:WINDOW], rewards[-WINDOW:]))
    assert last - first > MIN_RISE, f"{first:.3f} → {last:.3f}"


def test_wait_ends_with_the_trainers_status(finished: Stack) -> None:
    done = finished.make("wait")
    assert done.returncode == 0
    assert "trainer-shared ended with status 0" in done.stdout


def test_a_complete_run_goes_on_with_more_steps_or_begins_anew(
    finished: Stack, tmp_path: Path
) -> None:
    run_again(finished, STEPS=str(STEPS + MORE_STEPS))
    run_again(finished, STEPS=str(MORE_STEPS), RESUME="never")
    steps = [*range(1, STEPS + MORE_STEPS + 1), *range(1, MORE_STEPS + 1)]
    assert [record["step"] for record in records(finished, tmp_path)] == steps


def run_again(stack: Stack, **settings: str) -> None:
    """Once the environment has left too: Compose leaves alone what runs when it looks."""
    stack.wait_until(
        lambda: not stack.inspect("environment")["State"]["Running"], RUN_WITHIN_S, "it has left"
    )
    done = stack.up(**settings)
    assert done.returncode == 0, done.stdout + done.stderr + stack.logs()
    assert stack.wait_for_the_trainer(RUN_WITHIN_S) == 0, stack.logs()


def test_nothing_was_said_in_vain(finished: Stack) -> None:
    """Server and trainer are not the first process of their namespace, and reap all the same."""
    assert "Tini is not running as PID 1" not in finished.logs(tail=1000)
