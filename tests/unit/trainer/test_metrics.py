from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_core.wire import PolicyVersion
from grpo_trainer.batch import BatchFacts
from grpo_trainer.loss import NO_SUMS
from grpo_trainer.metrics import StepTimes, append_record, step_record
from grpo_trainer.weight_sync.base import Published


def record(first_versions: list[PolicyVersion]) -> dict[str, float]:
    """Of step index 7 in epoch 3: 100 tokens in 2 seconds."""
    return step_record(
        step=7,
        steps=10,
        time_s=9.0,
        loss=0.5,
        lr=1e-4,
        sums=NO_SUMS,
        facts=BatchFacts(4, 100, 0.25, 0.0, 0, first_versions, 0.1),
        published=Published(PolicyVersion(3, 8), 1.5, 0.1, 0.2),
        times=StepTimes(wait_s=0.5, train_s=1.0, publish_s=0.2, step_s=2.0),
        alignment=None,
    )


def test_staleness_counts_steps_within_the_epoch_only() -> None:
    """Versions of an earlier trainer are no nearer for having a low or a high step."""
    versions = [PolicyVersion(3, 7), PolicyVersion(3, 4), PolicyVersion(2, 7), PolicyVersion(1, 90)]
    found = record(versions)
    assert found["staleness/mean"] == 1.5
    assert found["staleness/max"] == 3
    assert found["staleness/other_epoch_fraction"] == 0.5
    assert found["throughput/tokens_per_s"] == 50
    assert found["step"] == 8


def test_without_versions_nothing_is_said_about_staleness() -> None:
    assert not [key for key in record([]) if key.startswith("staleness")]


def test_records_are_appended_whole_and_never_hold_nan(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    append_record(path, {"step": 1})
    append_record(path, {"step": 2})
    with pytest.raises(ValueError, match="not JSON compliant"):
        append_record(path, {"step": float("nan")})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1},
        {"step": 2},
    ]
