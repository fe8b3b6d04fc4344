from __future__ import annotations

from collections.abc import Iterable

from structlog.testing import capture_logs
from structlog.typing import EventDict

from grpo_trainer.healthy_ranges import REPEAT_EVERY_STEPS, RangeWatch


def watch(records: Iterable[dict[str, float]]) -> list[EventDict]:
    ranges = RangeWatch()
    with capture_logs() as logs:
        for step, values in enumerate(records, start=1):
            ranges.look({"step": step, **values})
    assert all(entry["log_level"] == "warning" for entry in logs)
    return [dict(entry) for entry in logs]


def test_a_value_outside_is_named_with_its_range() -> None:
    assert watch({"grpo/mean_ratio": value} for value in (0.8, 1.0, 1.2)) == []
    (low,) = watch([{}, {"grpo/mean_ratio": 0.79}])
    assert (low["metric"], low["value"], low["step"]) == ("grpo/mean_ratio", 0.79, 2)
    assert low["healthy"] == "0.8 to 1.2"
    (high,) = watch([{"grpo/mean_ratio": 1.21}])
    assert high["value"] == 1.21


def test_a_thousand_steps_outside_are_not_a_thousand_lines() -> None:
    """Half of them: the value comes and goes."""
    warnings = watch({"grpo/mean_ratio": value} for value in [1.5, 1.0] * 500)
    assert len(warnings) == 1000 // REPEAT_EVERY_STEPS
    assert [w["step"] for w in warnings[:2]] == [1, 1 + REPEAT_EVERY_STEPS]
    assert warnings[1]["steps_outside_since_last_warning"] == REPEAT_EVERY_STEPS // 2
