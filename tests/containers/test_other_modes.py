"""All side by side, in projects and with ports of their own: the modes that hand weights over as
files, and server and trainer in one container, for clusters that cannot give one GPU to two."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.containers.stack import NOISE, TEST_WITHIN_S, Stack, own_ports

STEPS = 2
RESTARTS = {"lora_only": 0, "lora_restart": 1, "none": 0}
RANKS = {"lora_only": 2}
"""In the other modes, one."""
SAVED = {"lora_only": "final_adapter", "lora_restart": "final_adapter", "none": "final_model"}
SINGLE = "single"

pytestmark = pytest.mark.timeout(TEST_WITHIN_S)


@pytest.fixture(scope="module")
def stacks(stack_settings: dict[str, str], own_model: Path) -> Iterator[dict[str, Stack]]:
    """After their trainers have ended well."""
    settings = {"STEPS": str(STEPS), "RESTART_INTERVAL": str(STEPS), "LR": "3e-3"}
    stacks = {}
    for mode in (*RESTARTS, SINGLE):
        stacks[mode] = Stack(mode, f"grpo-test-{mode}", stack_settings | settings | own_ports())
    with ThreadPoolExecutor(len(stacks)) as pool:
        try:
            list(pool.map(lambda stack: run_through(stack, own_model), stacks.values()))
            yield stacks
        finally:
            list(pool.map(lambda stack: stack.compose("down", "--volumes"), stacks.values()))
    assert [left for stack in stacks.values() for left in stack.left_behind()] == []


def run_through(stack: Stack, model: Path) -> None:
    if stack.mode == SINGLE:  # make up starts modes
        own = {"MODEL": "/model", "MODEL_DIR": str(model)}
        started = stack.compose("up", "--detach", **own)
        assert started.returncode == 0, started.stderr + stack.logs()
        stack.wait_for_the_end(SINGLE)
    else:
        stack.up_well(MODEL=str(model), RANKS=str(RANKS.get(stack.mode, 1)))
        stack.wait_for_the_end()


@pytest.mark.parametrize("mode", RESTARTS)
def test_a_mode_publishes_its_weights_saves_them_and_drops_nothing(
    stacks: dict[str, Stack], mode: str, tmp_path: Path
) -> None:
    records = stacks[mode].fetch(tmp_path)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    # The served log-probabilities are those of the new weights, and not those of the old.
    assert records[-1]["alignment/probe_max"] < NOISE
    assert records[-1]["alignment/probe_moved"] > 100 * NOISE
    assert (tmp_path / mode / SAVED[mode]).is_dir()
    summary = json.loads((tmp_path / mode / "benchmark.json").read_text())
    assert (summary["restarts"], summary["dropped_requests"]) == (RESTARTS[mode], 0)
    assert set(stacks[mode].restarts().values()) == {0}  # of containers
    assert re.search("weights.unprotected .*port=26756 ", stacks[mode].logs(tail=1000))
    start = json.loads((tmp_path / mode / "provenance.jsonl").read_text().splitlines()[0])
    assert start["machine"]["ranks"] == RANKS.get(mode, 1)


def test_server_and_trainer_in_one_container_train_and_save(stacks: dict[str, Stack]) -> None:
    said = stacks[SINGLE].logs(tail=200)
    assert "BENCHMARK SUMMARY (shared_vllm)" in said
    assert "directory=/checkpoints/single/final_model" in said
