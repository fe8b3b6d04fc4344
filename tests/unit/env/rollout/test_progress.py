from __future__ import annotations

import pytest

from grpo_env.rollout.grading import Grade
from grpo_env.rollout.outcome import FailureReason, RolloutFailure
from grpo_env.rollout.progress import Progress, RewardSample


def test_only_equal_scores_lower_the_share_of_kept_groups() -> None:
    progress = Progress()
    assert progress.kept_share == 1
    for _ in range(3):
        progress.record(RolloutFailure(FailureReason.EQUAL_SCORES, "all 1"))
    assert progress.kept_share == pytest.approx(1 / 4)
    for _ in range(64):  # older groups are forgotten
        progress.record(RolloutFailure(FailureReason.UNAVAILABLE, "no server"))
    assert progress.kept_share == 1


def test_parts_of_rewards_are_added_up_and_can_be_given_back() -> None:
    sample = RewardSample()
    sample.add([Grade(0.5, {"accuracy": 1.0, "length": -0.5}), Grade(0.0, {"accuracy": 0.0})])
    taken = sample.take()
    sample.add([Grade(1.0, {"accuracy": 1.0})])
    sample.give_back(taken)
    assert (sample.total, sample.count) == (1.5, 3)
    assert sample.parts == {"accuracy": 2.0, "length": -0.5}
