from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.errors import ProtocolViolation
from grpo_local.metrics_file import MetricsFile
from tests.unit.local.records import metrics_line

TEXT = "".join(metrics_line(step) for step in range(1, 4))


@given(cuts=st.sets(st.integers(0, len(TEXT))))
def test_every_line_is_read_once_however_it_is_written(cuts: set[int]) -> None:
    """And none before its end is there."""
    edges = [0, *sorted(cuts), len(TEXT)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "metrics.jsonl")
        metrics, seen = MetricsFile(path), []
        assert metrics.read_new() == []
        for start, stop in pairwise(edges):
            with path.open("a") as file:
                file.write(TEXT[start:stop])
            seen += [record.step for record in metrics.read_new()]
            assert seen == list(range(1, TEXT[:stop].count("\n") + 1))


def test_values_reach_their_fields(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(metrics_line(7, **{"alignment/diff_abs_mean": None, "new/key": 1}))
    (record,) = MetricsFile(path).read_new()
    assert (record.reward_mean, record.clipped_fraction, record.sync_s) == (0.7, 0.025, 0.05)
    assert record.alignment_abs_mean is None


def test_a_complete_line_that_is_no_record_names_file_line_and_field(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(metrics_line(1) + metrics_line(2, **{"train/loss": "high"}))
    with pytest.raises(ProtocolViolation, match=r"metrics\.jsonl line 2: train/loss: "):
        MetricsFile(path).read_new()
