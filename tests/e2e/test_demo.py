"""The whole system, as `make demo` runs it: five processes, a real model, which learns."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.demo_run import DEADLINE_S, NOISE, DemoRun, accuracy_of, load_model, run_demo

STEPS = 30
MIN_RISE = 0.03
"""Of the saved model's exact accuracy. Seen: 0.110; a model that learns nothing stays at 0."""
FILES = {
    *("metrics.jsonl", "reward.png", "checkpoints/final_model/model.safetensors"),
    *("logs/run-api.log", "logs/vllm-server.log", "logs/environment.log", "logs/trainer.log"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> DemoRun:  # noqa: ARG001
    """It finds `tiny_model` in the cache."""
    return run_demo(tmp_path_factory.mktemp("demo") / "run", "--steps", str(STEPS))


@pytest.mark.timeout(DEADLINE_S + 60)
def test_the_server_serves_the_trained_weights_throughout(run: DemoRun) -> None:
    records = run.records
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    probed = {record["step"]: record for record in records if "alignment/probe_max" in record}
    assert list(probed) == [1, *range(10, STEPS + 1, 10)]
    assert max(record["alignment/probe_max"] for record in probed.values()) < NOISE
    # With the weights of the probe before, the check would have failed.
    assert min(probed[step]["alignment/probe_moved"] for step in list(probed)[1:]) > 100 * NOISE


def test_completions_are_fresh_and_carry_the_logprobs_of_the_weights_they_name(
    run: DemoRun,
) -> None:
    staleness = [record["staleness/max"] for record in run.records]
    assert max(staleness) <= 3  # flow control
    fresh = [r["alignment/diff_max"] for r in run.records if r["staleness/max"] == 0]
    assert fresh
    assert max(fresh) < NOISE


def test_the_saved_model_is_an_ordinary_one_and_has_learnt(run: DemoRun, tiny_model: Path) -> None:
    final = run.directory / "checkpoints" / "final_model"
    rise = accuracy_of(load_model(final), final) - accuracy_of(load_model(tiny_model), tiny_model)
    assert rise > MIN_RISE, rise


def test_the_user_sees_progress_and_results(run: DemoRun) -> None:
    assert {name for name in FILES if (run.directory / name).exists()} == FILES
    for word in ("vllm-server ready", f"{STEPS}/{STEPS}", "reward:", "reward.png"):
        assert word in run.output
    assert max(len(line) for line in run.output.splitlines()) <= 110
