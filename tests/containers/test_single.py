"""Server and trainer in one container, for clusters that cannot give one GPU to two."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.containers.stack import TEST_WITHIN_S, Stack

STEPS = 2
RUN_WITHIN_S = 600

pytestmark = pytest.mark.timeout(TEST_WITHIN_S)


@pytest.fixture
def stack(stack_settings: dict[str, str]) -> Iterator[Stack]:
    ports = {"RUN_API_PORT": "18030", "VLLM_PORT": "19030"}
    stack = Stack("single", "grpo-test-single", {**stack_settings, **ports, "STEPS": str(STEPS)})
    yield stack
    stack.compose("down", "--volumes", "--timeout", "5")
    assert stack.left_behind() == []


def test_it_trains_and_ends_with_the_trainers_status(stack: Stack) -> None:
    started = stack.compose("up", "--detach")
    assert started.returncode == 0, started.stderr + stack.logs()
    container = stack.container("single")
    done = subprocess.run(
        ["docker", "wait", container],
        capture_output=True,
        text=True,
        timeout=RUN_WITHIN_S,
        check=True,
    )
    assert int(done.stdout) == 0, stack.logs()
    said = stack.logs(tail=200)
    assert "BENCHMARK SUMMARY (shared_vllm)" in said
    assert "directory=/checkpoints/single/final_model" in said
