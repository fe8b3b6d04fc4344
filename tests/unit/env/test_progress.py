from __future__ import annotations

from grpo_env.progress import Progress, RewardSample
from grpo_env.rollout import FailureReason, RolloutFailure
from tests.unit.env.clock import Clock


def test_a_reward_sample_is_handed_over_once_and_can_come_back() -> None:
    sample = RewardSample()
    sample.add([1.0, 0.0, 1.0])

    taken = sample.take()
    sample.add([1.0])
    assert taken.on_the_wire().model_dump() == {"sum": 2.0, "count": 3}
    assert sample.on_the_wire().model_dump() == {"sum": 1.0, "count": 1}
    sample.give_back(taken)
    assert sample.on_the_wire().model_dump() == {"sum": 3.0, "count": 4}


def test_a_line_covers_the_time_since_the_last_one() -> None:
    clock = Clock()
    progress = Progress(clock)
    progress.record(RolloutFailure(FailureReason.EQUAL_SCORES, "", (1.0, 1.0), 30))
    progress.record(RolloutFailure(FailureReason.TOO_LONG, "", (0.0, 1.0), 20))
    assert progress.report_if_due() is None

    clock.now += 5.0
    assert progress.report_if_due() == {
        "groups_sent": 0,
        "failures": {"equal_scores": 1, "too_long": 1},
        "mean_reward": 0.75,
        "equal_scores_share": 0.5,
        "tokens_per_s": 10.0,
    }
    clock.now += 5.0
    line = progress.report_if_due()
    assert line is not None
    assert line["mean_reward"] is None
    assert line["failures"] == {"equal_scores": 1, "too_long": 1}
