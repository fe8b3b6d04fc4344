from __future__ import annotations

from collections.abc import Iterable

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from grpo_trainer.healthy_ranges import RANGES, REPEAT_EVERY_STEPS, RangeWatch

HEALTHY = {
    "grpo/mean_ratio": 1.0,
    "grpo/clipped_fraction": 0.02,
    "alignment/diff_abs_mean": 0.01,
    "train/loss": -0.1,
}


def watch(records: Iterable[dict[str, float]]) -> list[EventDict]:
    ranges = RangeWatch()
    with capture_logs() as logs:
        for step, values in enumerate(records, start=1):
            ranges.look({"step": step, **values})
    assert all(entry["log_level"] == "warning" for entry in logs)
    return [dict(entry) for entry in logs]


@pytest.mark.parametrize(
    ("metric", "value", "healthy"),
    [
        ("grpo/mean_ratio", 0.79, "0.8 to 1.2"),
        ("grpo/mean_ratio", 1.21, "0.8 to 1.2"),
        ("grpo/clipped_fraction", 0.31, "0 to 0.3"),
        ("alignment/diff_abs_mean", 0.11, "0 to 0.1"),
        ("train/loss", -10.1, "at least -10"),
    ],
)
def test_a_value_outside_is_named_with_its_range(metric: str, value: float, healthy: str) -> None:
    (warning,) = watch([HEALTHY, HEALTHY | {metric: value}])
    assert (warning["metric"], warning["value"], warning["healthy"]) == (metric, value, healthy)
    assert warning["step"] == 2
    assert len(warning["look_at"]) > 20


def test_values_inside_and_absent_ones_are_no_news() -> None:
    edges = {"grpo/mean_ratio": 0.8, "grpo/clipped_fraction": 0.3, "train/loss": -10.0}
    assert watch([HEALTHY, edges, {}, {"train/loss": 1000.0}]) == []


@pytest.mark.parametrize("pattern", [[1.5], [1.5, 1.0]])
def test_a_thousand_steps_outside_are_not_a_thousand_lines(pattern: list[float]) -> None:
    """Whether the value stays outside or comes and goes."""
    values = pattern * (1000 // len(pattern))
    warnings = watch({"grpo/mean_ratio": value} for value in values)
    assert len(warnings) == 1000 // REPEAT_EVERY_STEPS
    assert [w["step"] for w in warnings[:2]] == [1, 1 + REPEAT_EVERY_STEPS]
    outside = [w["steps_outside_since_last_warning"] for w in warnings]
    assert outside[:2] == [1, REPEAT_EVERY_STEPS // len(pattern)]


def test_each_metric_is_watched_by_itself() -> None:
    outside = {healthy.metric: -100.0 for healthy in RANGES}
    assert {w["metric"] for w in watch([outside] * 10)} == set(outside)
