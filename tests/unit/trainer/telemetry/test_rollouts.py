"""The rollouts of a step as the trainer records them, by hand, and their files."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from grpo_core.rollouts.files import read_steps, steps_in, write_step
from grpo_core.tree.trainer import TrainerSettings
from grpo_core.tree.trainer_command import CommandLine
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.errors import CheckpointNotSaved
from grpo_trainer.telemetry import rollouts
from grpo_trainer.telemetry.rollouts import (
    MAX_BYTES,
    RolloutWriter,
    prepare_rollouts,
    sample_table,
)
from tests.support.conversations import record
from tests.support.directories import files_of_at_most, names
from tests.support.wait import DEADLINE_S, wait_for
from tests.unit.trainer.groups import good, group
from tests.unit.trainer.telemetry.step_rollouts import rollouts_of, usable_of
from tests.unit.trainer.tiny_policy import model_directory

PER_TOKEN = [[0.0, 0.0, 0.5], [0.0, 0.0, 1.0, 2.0, 6.0]]
"""Advantages for each token of `group()`."""


def test_every_value_finds_its_sequence_in_a_reordered_and_cut_batch() -> None:
    """Step 6 updates the weights that took 5 steps."""
    sampled = {"policy_version": [[[1, 3], [1, 4]], [[2, 3], [2, 3]]]}
    hot = {"temperature": 0.5}
    groups = group(advantages=PER_TOKEN), group(group_overrides=sampled | hot)
    found = rollouts_of(usable_of(*groups), seq_len=4).records()
    assert [(r.group, r.index, r.score) for r in found] == [
        *[(0, 0, 1.0), (0, 1, 0.0)],
        *[(1, 0, 1.0), (1, 1, 0.0)],
    ]
    assert [r.logprobs for r in found] == [[-0.07], [-0.08, -0.09]] * 2
    assert [r.behaviour_logprobs for r in found] == [[-0.1], [-0.2, -0.3]] * 2
    assert [r.mask for r in found] == [[0, 0, 1], [0, 0, 1, 1, 0]] * 2
    assert [len(r.tokens) for r in found] == [3, 5] * 2
    assert [r.completion_tokens for r in found] == [1, 3] * 2
    assert [r.advantage for r in found] == [0.5, 1.5, 1.0, -1.0]
    assert [r.versions for r in found] == [None, None, [[1, 3], [1, 4]], [[2, 3], [2, 3]]]
    assert [r.staleness for r in found] == [None, None, 2, None]  # steps of another epoch
    assert [r.temperature for r in found] == [1.0, 1.0, 0.5, 0.5]


def test_values_that_are_missing_or_impossible() -> None:
    """A sequence whose trained tokens are all cut off, logprobs that were not logged, a version
    that is only bounded, and a token that the policy cannot sample."""
    late = group(masks=[[-100, -100, 7], [-100, -100, -100, -100, 10]], advantages=PER_TOKEN)
    sequences = [
        replace(sequence, received_under=PolicyVersion(1, 1)) if sequence.group_index else sequence
        for sequence in usable_of(late, group(inference_logprobs=None))
    ]
    step = rollouts_of(sequences, seq_len=4)
    step.tokens.logp[0] = -float("inf")
    _, cut, plain, other = step.records()
    assert (cut.mask, cut.logprobs, cut.behaviour_logprobs) == ([0] * 5, [], [])
    assert (cut.advantage, cut.completion_tokens) == (None, 1)
    assert (plain.behaviour_logprobs, plain.logprobs) == ([], [-0.07])
    assert (plain.versions, plain.staleness) == (None, 4)
    assert other.logprobs == [pytest.approx(-3.4e38, rel=0.01), -0.09]


def test_the_last_step_is_on_disk_when_the_writer_is_closed(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path, keep=2)
    for step in (1, 2, 3):
        writer.add(rollouts_of(usable_of(good(step)), step=step))
    writer.close()
    found = list(read_steps(tmp_path))
    assert [(r.step, r.index) for r in found] == [(2, 0), (2, 1), (3, 0), (3, 1)]
    assert found[2:] == rollouts_of(usable_of(good(3)), step=3).records()


def test_at_most_two_steps_wait_for_the_disk_and_one_that_hangs_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on, begins = [], threading.Event(), threading.Event()

    def write(*arguments: Any) -> None:
        begun.append(arguments[1])
        begins.set()
        goes_on.wait(DEADLINE_S)

    monkeypatch.setattr(rollouts, "write_step", write)
    writer = RolloutWriter(tmp_path, keep=9, deadline_s=0.2)
    step = rollouts_of(usable_of(good(1)))
    with capture_logs() as logs:
        writer.add(step)
        begins.wait(DEADLINE_S)
        writer.add(step)
        assert (begun, logs) == ([6], [])
        for _ in range(3):  # waits once
            writer.add(step)
        writer.close()
    assert [entry["event"] for entry in logs] == ["rollouts.stopped"]
    assert "took no rollouts for 0.2 s" in logs[0]["reason"]
    goes_on.set()
    wait_for(lambda: len(begun) == 2)  # else the thread would write the second one for real


def test_a_full_disk_warns_once_and_the_writer_tries_again(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path, keep=9)
    with capture_logs() as logs:
        with files_of_at_most(16):
            for step in (1, 2, 3, 4):  # the fourth waits, so the second has been tried
                writer.add(rollouts_of(usable_of(good(step)), step=step))
        writer.add(rollouts_of(usable_of(good(5)), step=5))
        writer.close()
    assert [(entry["event"], entry["step"]) for entry in logs] == [("rollouts.not_written", 1)]
    assert "File too large" in logs[0]["reason"]
    assert {1, 2, 5} & set(steps_in(tmp_path)) == {5}


def settings(model: Path, save_path: Path, **changes: Any) -> TrainerSettings:
    command = CommandLine(model=str(model), mode="shared_vllm", save_path=save_path, **changes)
    return command.settings()


def test_a_start_keeps_the_steps_of_its_run_alone(tmp_path: Path) -> None:
    model, save_path = model_directory(tmp_path / "model"), tmp_path / "run"
    own, elsewhere = save_path / "rollouts", tmp_path / "other"
    for directory in (own, elsewhere):
        for step in (1, 2, 3):
            write_step(directory, step, [record(step=step)])
    prepare_rollouts(settings(model, save_path), steps_taken=2)
    assert names(own) == ["step-000001.jsonl.gz", "step-000002.jsonl.gz", "tokenizer.json"]
    assert (own / "tokenizer.json").read_text() == (model / "tokenizer.json").read_text()
    for _ in range(2):  # a new run, whose trainer was killed before its first step
        prepare_rollouts(settings(model, save_path), steps_taken=None)
        assert names(own) == ["tokenizer.json"]
    assert steps_in(save_path / "rollouts.1") == [1, 2]
    prepare_rollouts(settings(model, save_path, rollouts_dir=elsewhere), steps_taken=0)
    assert steps_in(elsewhere) == []
    prepare_rollouts(settings(model, tmp_path / "none", keep_rollouts=0), steps_taken=None)
    assert not (tmp_path / "none").exists()
    (model / "tokenizer.json").unlink()
    with capture_logs() as logs:
        prepare_rollouts(settings(model, tmp_path / "slow"), steps_taken=None)
    assert [entry["event"] for entry in logs] == ["rollouts.tokenizer_skipped"]


def test_a_directory_that_cannot_be_written_ends_the_start(tmp_path: Path) -> None:
    model = model_directory(tmp_path / "model")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointNotSaved, match=r"file/tokenizer\.json could not be written"):
        prepare_rollouts(settings(model, tmp_path, rollouts_dir=tmp_path / "file"), None)


def test_samples_range_from_the_worst_score_to_the_best_and_fit_into_the_pipe() -> None:
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "é" * 10_000}]
    scores = [[0.0, 0.9], [0.1, 0.8], [0.2, 0.7], [0.3, 0.6], [0.4, 0.5]]
    graded = {"grade_reason": "why"}
    groups = [
        group(
            scores=pair,
            messages=[said] * 2,
            overrides=[graded] * 2,
            group_overrides={"task": "sums"},
        )
        for pair in scores
    ]
    table = sample_table(rollouts_of(usable_of(*groups), step=10))
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [row["score"] for row in rows] == [0.0, 0.1, 0.2, 0.3, 0.5, 0.6, 0.7, 0.9]
    assert {(row["step"], row["task"], row["prompt"], row["reason"]) for row in rows} == {
        (10, "sums", "q", "why")
    }
    assert [row["advantage"] for row in rows] == [-1.0] * 4 + [1.0] * 4
    assert len(str(rows).encode("unicode_escape")) < MAX_BYTES
    (bare,) = sample_table(rollouts_of(usable_of(group()), size=1)).rows[:1]
    assert bare[2:5] == ["", "token ids: 5 6 8 9 10", 0.0]
