"""A metric outside its healthy range is reported when it stays there."""

from __future__ import annotations

from structlog.testing import capture_logs

from grpo_trainer.checks.findings import RangeWatch


def warned_at(values: list[float]) -> list[int]:
    """Steps with a warning, for the clipped fraction at each step."""
    watch = RangeWatch()
    with capture_logs() as logs:
        for step, value in enumerate(values):
            watch.look({"step": step, "grpo/clipped_fraction": value})
    return [entry["step"] for entry in logs]


def test_a_metric_is_reported_after_three_steps_in_a_row_and_then_every_fifty() -> None:
    assert warned_at([0.9, 0.9, 0.1, 0.9, 0.9, 0.1]) == []
    assert warned_at([0.9] * 60) == [2, 52]
