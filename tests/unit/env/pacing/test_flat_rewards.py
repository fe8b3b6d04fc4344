"""Rewards that never differ."""

from __future__ import annotations

from structlog.testing import capture_logs

from grpo_env.pacing.flat_rewards import FIRST_GROUPS, FlatRewards


def warnings(*groups: list[float]) -> list[float]:
    flat = FlatRewards()
    with capture_logs() as logs:
        for scores in groups:
            flat.graded(scores)
    return [entry["score"] for entry in logs if entry["event"] == "rewards.all_equal"]


def test_the_same_score_in_all_first_groups_is_named_once() -> None:
    flat = [[0.5, 0.5]] * FIRST_GROUPS
    assert warnings(*flat[1:]) == []
    assert warnings(*flat, [0.5, 0.5], [1.0, 0.0]) == [0.5]
    assert warnings(*flat[1:], [], [0.5, 1.0], *flat) == []
    assert warnings(*[[float(i % 2)] * 2 for i in range(FIRST_GROUPS)]) == []
