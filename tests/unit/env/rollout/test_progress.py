from __future__ import annotations

import pytest

from grpo_env.rollout.progress import Progress
from grpo_env.rollout.rollout import FailureReason, RolloutFailure


def test_only_equal_scores_lower_the_share_of_kept_groups() -> None:
    progress = Progress()
    assert progress.kept_share == 1
    for _ in range(3):
        progress.record(RolloutFailure(FailureReason.EQUAL_SCORES, "all 1"))
    assert progress.kept_share == pytest.approx(1 / 4)
    for _ in range(64):  # older groups are forgotten
        progress.record(RolloutFailure(FailureReason.UNAVAILABLE, "no server"))
    assert progress.kept_share == 1
