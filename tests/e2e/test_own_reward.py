"""The command of README.md's section "Your own reward" trains, evaluates, and keeps what the model
said. `make test` runs a few steps of it, `make test-full` all."""

from __future__ import annotations

import re
from collections import Counter
from math import isfinite
from pathlib import Path
from statistics import fmean

import pytest

from grpo_core.evaluation.results import read_summaries
from grpo_core.evaluation.tables import compare
from grpo_core.rollouts.files import ROLLOUTS, read_step, steps_in
from tests.e2e.conftest import SHORT_STEPS
from tests.e2e.demo_run import DEADLINE_S, NOISE, DemoRun, readme_flags, run_demo, run_local

SEQUENCES = 128
"""Of a step: two micro-batches of 64."""
ENDS = 25
"""Steps at each end of the whole run."""
MIN_LIFT = 0.2
"""Of the mean reward and of the accuracy on held-out items."""

pytestmark = pytest.mark.timeout(DEADLINE_S + 60)


def test_the_policy_is_evaluated_before_and_after_on_items_that_are_never_trained(
    own_reward_run: DemoRun,
) -> None:
    summaries = read_summaries(own_reward_run.directory / "eval.jsonl")
    assert [summary.step for summary in summaries] == [0, SHORT_STEPS]
    first, last = own_reward_run.evaluations
    assert first.metrics == summaries[0].metrics
    held_out = {item.item for item in first.items}
    assert held_out == {item.item for item in last.items}
    trained = {
        record.item
        for step in range(1, SHORT_STEPS + 1)
        for record in read_step(own_reward_run.directory / ROLLOUTS, step)
    }
    assert len(held_out) >= 10
    assert len(trained) > 50
    assert trained & held_out == set()

    for summary in summaries:
        value, interval = summary.metrics["pass@1"], summary.intervals["pass@1"]
        shown = f"pass@1 {value:.3f} ({interval.low:.3f} to {interval.high:.3f})"
        assert f"evaluation of sums after {summary.step} steps: {shown}" in own_reward_run.output
    assert re.search(lift_line(first.metrics["pass@1"]), own_reward_run.output, re.MULTILINE)


def lift_line(before: float) -> str:
    """The pattern of the summary's line."""
    number = r"[+-]\d\.\d{3}"
    return (
        rf"^held out: sums: pass@1 {before:.3f} to \d\.\d{{3}} on \d+ held-out items, "
        rf"{number} \({number} to {number}(, may be chance)?\)$"
    )


def test_every_sequence_of_every_step_is_kept_with_its_numbers(own_reward_run: DemoRun) -> None:
    directory = own_reward_run.directory / ROLLOUTS
    assert steps_in(directory) == list(range(1, SHORT_STEPS + 1))
    for step, metrics in enumerate(own_reward_run.records, start=1):
        records = list(read_step(directory, step))
        assert len(records) == SEQUENCES
        assert set(Counter(record.group for record in records).values()) == {8}
        for record in records:
            trained = sum(record.mask)
            assert trained == len(record.behaviour_logprobs) == len(record.logprobs or ())
            assert all(map(isfinite, [*record.behaviour_logprobs, *(record.logprobs or ())]))
            assert record.parts.keys() == {"accuracy", "number"}
            assert record.score == pytest.approx(sum(record.parts.values()))
            prompt, answer = record.messages
            assert re.fullmatch(r"\d\+\d=", prompt["content"])
            a, b = map(int, prompt["content"][:-1].split("+"))
            assert record.parts["accuracy"] == (answer["content"].strip() == str(a + b))
            assert record.versions is not None
            assert record.staleness == step - 1 - record.versions[0][1]
            assert record.advantage is not None
            assert record.finish_reason in ("stop", "length")
            assert record.task == "sums"
        assert fmean(r.staleness or 0 for r in records) == pytest.approx(metrics["staleness/mean"])
        fresh = [r.mean_logprob_difference for r in records if r.staleness == 0]
        assert all(difference is not None and difference < NOISE for difference in fresh)


def test_what_the_model_said_can_be_read(own_reward_run: DemoRun) -> None:
    page = own_reward_run.directory / "report.html"
    assert "sums" in page.read_text(encoding="utf-8")
    assert str(page) in own_reward_run.output
    shown = run_local("rollouts", str(own_reward_run.directory), "--worst", "--step", "1")
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"\d\+\d=", shown.stdout)


@pytest.mark.full
@pytest.mark.usefixtures("tiny_model")
def test_the_whole_run_lifts_the_reward_and_the_accuracy_on_held_out_items(tmp_path: Path) -> None:
    run = run_demo(tmp_path / "run", *readme_flags())
    rewards = [record["reward/mean"] for record in run.records]
    assert fmean(rewards[-ENDS:]) - fmean(rewards[:ENDS]) >= MIN_LIFT
    first, last = run.evaluations
    (lift,) = (lift for lift in compare(first, last).lifts if lift.metric == "pass@1")
    assert lift.is_clear, lift
    assert lift.change >= MIN_LIFT, lift
