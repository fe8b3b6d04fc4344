from __future__ import annotations

from pathlib import Path

import pytest

from grpo_core.errors import ProtocolViolation
from grpo_local.metrics_file import MetricsFile
from tests.unit.local.records import metrics_line


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_no_file_yet_is_no_record(tmp_path: Path) -> None:
    assert MetricsFile(tmp_path / "metrics.jsonl").read_new() == []


def test_a_half_written_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    second = metrics_line(2)
    append(path, metrics_line(1) + second[:40])
    assert [record.step for record in metrics.read_new()] == [1]
    assert metrics.read_new() == []
    append(path, second[40:-1])
    assert metrics.read_new() == []
    append(path, "\n" + metrics_line(3))
    assert [record.step for record in metrics.read_new()] == [2, 3]
    assert metrics.read_new() == []


def test_values_reach_their_fields(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, metrics_line(7, **{"alignment/diff_abs_mean": None, "new/key": 1}))
    (record,) = MetricsFile(path).read_new()
    assert record.reward_mean == pytest.approx(0.7)
    assert record.clipped_fraction == pytest.approx(0.025)
    assert record.sync_s == pytest.approx(0.05)
    assert record.alignment_abs_mean is None


def test_a_complete_line_that_is_no_record_names_file_line_and_field(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, metrics_line(1) + metrics_line(2, **{"train/loss": "high"}))
    with pytest.raises(ProtocolViolation, match=r"metrics\.jsonl line 2: train/loss: "):
        MetricsFile(path).read_new()
