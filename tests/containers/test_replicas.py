"""Three inference servers, of which one is killed and comes back during a run that Prometheus
watches."""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_core.alerts import ALERTS
from grpo_runs.process.ports import free_port
from tests.containers.stack import NOISE, TEST_WITHIN_S, Stack, docker, run
from tests.containers.test_files import SECRETS

REPLICAS = 3
TOKEN = "planted-t0ken"
STEPS = 100_000
"""More than the run takes: the test ends it."""

pytestmark = pytest.mark.timeout(TEST_WITHIN_S)


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The settings that name the files of secrets, all of which hold TOKEN."""
    file = tmp_path_factory.mktemp("secrets") / "secret"
    file.write_text(f"{TOKEN}\n")
    return {f"{name}_FILE": str(file) for name in SECRETS}


@pytest.fixture(scope="module")
def stack(stack_settings: dict[str, str], secrets: dict[str, str]) -> Iterator[Stack]:
    settings = {"REPLICAS": str(REPLICAS), "STEPS": str(STEPS), "LR": "1e-4"}
    first = free_port()
    settings |= {"RUN_API_PORT": str(free_port()), "VLLM_PORT": f"{first}-{first + 20}"}
    settings |= {"PROMETHEUS_PORT": str(free_port())} | secrets
    stack = Stack("none", "grpo-test-replicas", stack_settings | settings)
    yield stack
    stack.down()


def asked(stack: Stack, path: str) -> Any:
    """The answer of Prometheus."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    url = f"http://127.0.0.1:{stack.settings['PROMETHEUS_PORT']}/api/v1/{path}"
    return json.loads(opener.open(url).read())["data"]


def dropped_requests(stack: Stack) -> int:
    """Of all servers that are there."""
    redis = ("exec", stack.container("redis"), "redis-cli", "--raw")
    keys = docker(*redis, "keys", "*:server:*").split()
    assert len(keys) >= REPLICAS
    return sum(int(docker(*redis, "hget", key, "dropped_requests")) for key in keys)


def reached(stack: Stack) -> list[int]:
    """For each step, how many servers had its weights in time."""
    lines = docker("exec", stack.container("trainer"), "cat", stack.metrics).splitlines()
    return [json.loads(line)["publication/servers"] for line in lines]


def targets_up(stack: Stack) -> dict[str, int]:
    """Their number by job."""
    found = asked(stack, "targets?state=active")["activeTargets"]
    return Counter(target["labels"]["job"] for target in found if target["health"] == "up")


def require_monitoring(stack: Stack) -> None:
    every = {"run-api": 1, "vllm-server": REPLICAS, "trainer": 1, "environment": 1}
    stack.wait_until(lambda: targets_up(stack) == every)
    (group,) = asked(stack, "rules")["groups"]
    assert [rule["name"] for rule in group["rules"]] == [f"grpo-{alert.name}" for alert in ALERTS]
    for query in ("run_api_servers", "grpo_trainer_steps_taken_total%3E0"):
        stack.wait_until(lambda query=query: asked(stack, f"query?query={query}")["result"])
    assert {rule["health"] for rule in asked(stack, "rules")["groups"][0]["rules"]} <= {
        "ok",
        "unknown",  # not evaluated yet
    }


def require_the_token_which_docker_hides(stack: Stack) -> None:
    for url in ("http://run-api:8000/status", "http://vllm-server:9001/v1/models"):
        asks = f"import urllib.request as r; r.urlopen({url!r})"
        done = run(["docker", "exec", stack.container("environment"), "python", "-c", asks])
        assert "HTTP Error 401" in done.stderr
    shown = docker("inspect", *docker("ps", "--all", "--quiet", *stack.label()).split())
    assert "/run/secrets/run_api_token" in shown
    assert TOKEN not in shown


def test_a_run_goes_on_without_one_of_three_servers_and_takes_it_back(
    stack: Stack, own_model: Path, tmp_path: Path
) -> None:
    stack.up_well(MODEL=str(own_model), MONITORING="1")
    servers = stack.containers("vllm-server-none")
    assert len(servers) == REPLICAS
    ports = {docker("port", server, "9001").strip() for server in servers}
    assert len(ports) == REPLICAS
    require_monitoring(stack)
    require_the_token_which_docker_hides(stack)
    stack.wait_until(lambda: stack.steps() >= 5)
    docker("kill", servers[0])
    gone_at = stack.steps()
    stack.wait_until(lambda: stack.steps() >= gone_at + 5)
    assert REPLICAS - 1 in reached(stack)[gone_at:]
    back_at = stack.steps()
    docker("start", servers[0])
    stack.wait_until(lambda: reached(stack)[back_at:].count(REPLICAS) >= 5)
    assert dropped_requests(stack) == 0
    docker("stop", stack.container("trainer"))
    records = stack.fetch(tmp_path)
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    assert all(record["alignment/probe_max"] < NOISE for record in records)
    assert all(record["publication/servers"] in (REPLICAS - 1, REPLICAS) for record in records)
    for server in servers:
        ended = docker("inspect", "--format", "{{.State.Running}}", server)
        assert ended.strip() == "true"
