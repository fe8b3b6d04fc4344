"""The modes that hand weights over as files, side by side: projects and ports of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.containers.stack import TEST_WITHIN_S, Stack

STEPS = 2
RUN_WITHIN_S = 900
RESTARTS = {"lora_only": 0, "lora_restart": 1, "none": 1}
SAVED = {"lora_only": "final_adapter", "lora_restart": "final_adapter", "none": "final_model"}

pytestmark = pytest.mark.timeout(TEST_WITHIN_S)


@pytest.fixture(scope="module")
def stacks(stack_settings: dict[str, str]) -> Iterator[dict[str, Stack]]:
    """All three, after their trainers have ended well."""
    settings = {**stack_settings, "STEPS": str(STEPS), "RESTART_INTERVAL": str(STEPS)}
    stacks = {
        mode: Stack(
            mode,
            f"grpo-test-{mode}",
            {**settings, "RUN_API_PORT": str(18010 + at), "VLLM_PORT": str(19010 + at)},
        )
        for at, mode in enumerate(RESTARTS)
    }
    try:
        with ThreadPoolExecutor(len(stacks)) as pool:
            list(pool.map(Stack.up_well, stacks.values()))
        for stack in stacks.values():
            assert stack.wait_for_the_trainer(RUN_WITHIN_S) == 0, stack.logs()
        yield stacks
    finally:
        for stack in stacks.values():
            stack.down()
    assert [left for stack in stacks.values() for left in stack.left_behind()] == []


@pytest.mark.parametrize("mode", RESTARTS)
def test_weights_were_published_and_nothing_was_dropped(
    stacks: dict[str, Stack], mode: str, tmp_path: Path
) -> None:
    fetched = stacks[mode].make("fetch-checkpoint", TO=str(tmp_path))
    assert fetched.returncode == 0, fetched.stderr
    directory = tmp_path / mode
    assert (directory / SAVED[mode]).is_dir()
    summary = json.loads((directory / "benchmark.json").read_text())
    assert summary["restarts"] == RESTARTS[mode]
    assert summary["dropped_requests"] == 0
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert len(records) == STEPS
    # A publication counts only once the served log-probabilities are those of the new weights.
    assert max(record.get("alignment/probe_max", 0.0) for record in records) > 0.0
    assert max(record.get("alignment/probe_max", 0.0) for record in records) < 1e-3


@pytest.mark.parametrize("mode", RESTARTS)
def test_no_container_had_to_be_restarted(stacks: dict[str, Stack], mode: str) -> None:
    assert {s: stacks[mode].restarts(s) for s in ("vllm-server", "trainer", "environment")} == {
        "vllm-server": 0,
        "trainer": 0,
        "environment": 0,
    }
