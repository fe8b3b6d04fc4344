"""Three inference servers, of which one is killed and comes back during a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_runs.process.ports import free_port
from tests.containers.stack import NOISE, TEST_WITHIN_S, Stack, docker

REPLICAS = 3
STEPS = 40

pytestmark = pytest.mark.timeout(TEST_WITHIN_S)


@pytest.fixture(scope="module")
def stack(stack_settings: dict[str, str]) -> Iterator[Stack]:
    settings = {"REPLICAS": str(REPLICAS), "STEPS": str(STEPS), "LR": "1e-4"}
    first = free_port()
    settings |= {"RUN_API_PORT": str(free_port()), "VLLM_PORT": f"{first}-{first + 20}"}
    stack = Stack("none", "grpo-test-replicas", stack_settings | settings)
    yield stack
    stack.down()


def test_a_run_goes_on_without_one_of_three_servers_and_takes_it_back(
    stack: Stack, own_model: Path, tmp_path: Path
) -> None:
    stack.up_well(MODEL=str(own_model))
    servers = stack.containers("vllm-server-none")
    assert len(servers) == REPLICAS
    ports = {docker("port", server, "9001").strip() for server in servers}
    assert len(ports) == REPLICAS
    stack.wait_until(lambda: stack.steps() >= 5)
    docker("kill", servers[0])
    gone_at = stack.steps()
    stack.wait_until(lambda: stack.steps() >= gone_at + 5)
    docker("start", servers[0])
    stack.wait_for_the_end()
    records = stack.fetch(tmp_path)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert max(record["alignment/probe_max"] for record in records) < NOISE
    reached = [record["publication/servers"] for record in records]
    assert REPLICAS in reached
    assert REPLICAS - 1 in reached
    benchmark = json.loads((tmp_path / stack.mode / "benchmark.json").read_text())
    assert (benchmark["publishes"], benchmark["dropped_requests"]) == (STEPS, 0)
    for server in servers:
        ended = docker("inspect", "--format", "{{.State.Running}}", server)
        assert ended.strip() == "true"
