"""Records of training steps: read from the file, shown as a table, summed up."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.errors import ProtocolViolation
from grpo_runs.report.steps import (
    MetricsFile,
    flat_start_hint,
    header_lines,
    step_line,
    trim_records,
)
from grpo_runs.report.summary import RunFacts, summarise, summary_lines
from tests.unit.runs.records import metrics_line, record
from tests.unit.runs.stand_ins import Shown

TEXT = "".join(metrics_line(step) for step in range(1, 4))


@given(cuts=st.sets(st.integers(0, len(TEXT))))
def test_every_line_is_read_once_however_it_is_written(cuts: set[int]) -> None:
    """No line is read before it is complete."""
    edges = [0, *sorted(cuts), len(TEXT)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "metrics.jsonl")
        metrics, seen = MetricsFile(path), []
        assert metrics.read_new() == []
        for start, stop in pairwise(edges):
            with path.open("a") as file:
                file.write(TEXT[start:stop])
            seen += [new.step for new in metrics.read_new()]
            assert seen == list(range(1, TEXT[:stop].count("\n") + 1))


def test_a_complete_line_that_is_no_record_names_file_line_and_field(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(metrics_line(1) + metrics_line(2, **{"train/loss": "high"}))
    with pytest.raises(
        ProtocolViolation, match=r"metrics\.jsonl line 2: .* missing or invalid fields: train/loss"
    ):
        MetricsFile(path).read_new()


def test_records_after_the_checkpoint_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert trim_records(path, 2) == []
    path.write_text(TEXT + '{"step": 4')
    assert [record.step for record in trim_records(path, 2)] == [1, 2]
    assert path.read_text() == metrics_line(1) + metrics_line(2)


def test_a_line_shows_each_value_under_its_title() -> None:
    titles, _ = header_lines(record(3))
    shown = dict(zip(titles.split(), step_line(record(3)).split(), strict=True))
    assert shown == {
        "step": "3/40",
        "reward": "0.300",
        "loss": "-0.0123",
        "ratio": "1.002",
        "clip": "2.5",
        "align": "2.5e-06",
        "stale": "0.50",
        "speed": "1234",
        "generate": "0.80",
        "wait": "0.30",
        "train": "0.60",
        "publish": "0.05",
    }
    distils = record(3, **{"distill/reverse_kl": 0.25})
    titles, _ = header_lines(distils)
    assert (titles.split()[-1], step_line(distils).split()[-1]) == ("reverse_kl", "0.2500")
    unmeasured = ("alignment/diff_abs_mean", "staleness/mean", "rollout/generation_time")
    assert step_line(record(1, **dict.fromkeys(unmeasured))).split().count("-") == 3


def test_a_pipe_gets_whole_plain_lines() -> None:
    shown = Shown()
    long = "see [run]/logs/trainer.log :warning: " + "x" * 200
    shown.line(long, style="bold red")
    with shown.activity("starting"):
        pass
    shown.failure("what\nwhere")
    assert shown.out == f"{long}\nstarting\n"
    assert shown.err == "what\nwhere\n"


def test_summary_by_hand() -> None:
    # rewards 0.1, 0.2, ... 4.0; a tenth of 40 steps is 4
    records = [record(step, **{"train/data_fetch_time": step % 2}) for step in range(1, 41)]
    summary = summarise(records, total_s=100.0, training_s=60.0)
    assert (summary.steps, summary.tenth_steps) == (40, 4)
    assert summary.first_reward == pytest.approx(0.25)
    assert summary.last_reward == pytest.approx(3.85)
    assert summary.fetch_s == pytest.approx(0.5)


def test_the_summary_of_a_resumed_run_separates_the_parts() -> None:
    records = [record(step, **{"train/data_fetch_time": 9 * (step <= 10)}) for step in range(1, 21)]
    summary = summarise(records, total_s=100.0, training_s=60.0, resumed_after=10)
    assert (summary.steps, summary.fetch_s) == (20, 0.0)
    assert (summary.first_reward, summary.last_reward) == pytest.approx((0.15, 1.95))
    facts = RunFacts(mode="none", seed=0, summary=summary, benchmark=None, peak_bytes={})
    names = [line.split(":")[0] for line in summary_lines(facts)]
    assert names == ["reward", "resumed", "time", "per step", "weights"]


@pytest.mark.parametrize(
    ("steps", "rise", "ratio", "is_shown"),
    [
        (10, 0.0, 1.0002, True),
        (10, 0.0, None, True),
        (10, 0.05, 1.0002, False),
        (10, 0.0, 1.02, False),
        (9, 0.0, 1.0, False),
        (11, 0.0, 1.0, False),
    ],
)
def test_a_hint_is_shown_once_if_neither_policy_nor_reward_moves(
    steps: int, rise: float, ratio: float | None, is_shown: bool
) -> None:
    noise = (0.01, -0.01)
    first = [
        record(n + 1, **{"reward/mean": 0.3 + noise[n % 2] + rise * n, "grpo/mean_ratio": ratio})
        for n in range(steps)
    ]
    hint = flat_start_hint(first, 1e-5)
    assert (hint is not None) is is_shown
    assert hint is None or "raise --lr (now 1e-05)" in hint
