"""One bad group is dropped and counted; bad groups as a rule end the run."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from grpo_core.wire import ScoredGroup
from grpo_trainer.errors import DuplicatedBatch, UnusableGroup, UnusableReason
from grpo_trainer.intake import REPEAT_EVERY_STEPS, WINDOW_BATCHES, Doorkeeper
from grpo_trainer.repeats import RecentBatches
from tests.unit.trainer.groups import VOCABULARY, bad, good


def test_bad_groups_are_dropped_counted_and_told_once_per_reason_and_environment() -> None:
    door = Doorkeeper(VOCABULARY)
    with capture_logs() as logs:
        first = door.admit([good(1), bad(2, env_id=1), good(3), bad(4, env_id=1), good(5)], step=0)
        second = door.admit([good(6), good(7), bad(8, env_id=1), bad(9, env_id=2)], step=1)
    assert (len(first.groups), first.unusable_groups) == (3, 2)
    assert (len(second.groups), second.unusable_groups) == (2, 2)
    told = [(entry["reason"], entry["env_id"]) for entry in logs]
    assert told == [("truncated_sampling", 1), ("truncated_sampling", 2)]
    assert "top_p=0.9" in logs[0]["example"]


def test_a_whole_batch_of_bad_groups_ends_the_run_with_every_reason() -> None:
    without = good(2).model_copy(update={"inference_logprobs": None})
    with pytest.raises(UnusableGroup, match="No group of the batch") as refused:
        Doorkeeper(VOCABULARY).admit([without, bad(1), bad(3)], step=0)
    assert refused.value.reason is UnusableReason.NO_LOGPROBS
    assert "no_inference_logprobs 1, truncated_sampling 2" in str(refused.value)


@pytest.mark.parametrize(
    ("bad_of_ten", "admitted"),
    [
        ([6] * 20, WINDOW_BATCHES - 1),
        ([5] * 20, 20),
        ([0] * 5 + [6] * 5, 9),
    ],
)
def test_more_than_half_of_five_batches_ends_the_run_and_half_does_not(
    bad_of_ten: list[int], admitted: int
) -> None:
    door = Doorkeeper(VOCABULARY)
    for step, count in enumerate(bad_of_ten):
        groups = [(bad if i < count else good)(10 * step + i) for i in range(10)]
        if step < admitted:
            door.admit(groups, step)
            continue
        with pytest.raises(UnusableGroup, match="of the 50 groups of the last 5 batches"):
            door.admit(groups, step)
        return
    assert admitted == len(bad_of_ten)


def test_a_batch_that_comes_again_ends_the_run_in_whatever_order() -> None:
    door = Doorkeeper(VOCABULARY)
    door.admit([good(1), good(2)], step=0)
    door.admit([good(3), good(4)], step=1)
    with pytest.raises(DuplicatedBatch, match=r"step 2: all 2 groups .* of step 0"):
        door.admit([good(2, env_id=9), good(1)], step=2)


def test_single_repeats_are_counted_and_told_now_and_then() -> None:
    door = Doorkeeper(VOCABULARY)
    door.admit([good(1), good(2)], step=0)
    door.admit([good(3), good(4)], step=1)
    with capture_logs() as logs:
        assert door.admit([good(1), good(3)], step=2).repeated_groups == 2
        assert door.admit([good(5), good(5), good(6)], step=3).repeated_groups == 1
        assert door.admit([good(7), good(8)], step=4).repeated_groups == 0
        later = 2 + REPEAT_EVERY_STEPS
        assert door.admit([good(1), good(9)], step=later).repeated_groups == 1
    assert [(entry["groups"], entry["step"]) for entry in logs] == [(2, 2), (1, later)]


@pytest.mark.parametrize(
    "other",
    [
        good(1, scores=[0.0, 1.0]),
        good(2),
        good(1).model_copy(update={"tokens": [[5, 6, 7], [5, 6, 8, 9, 11]]}),
    ],
)
def test_groups_that_differ_in_what_was_sampled_are_no_repeats(other: ScoredGroup) -> None:
    batches = RecentBatches()
    batches.count_repeats([good(1)], step=0)
    assert batches.count_repeats([other], step=1) == 0


def test_a_lone_group_may_come_twice_once() -> None:
    """An environment repeats a submission whose answer was lost."""
    batches = RecentBatches()
    assert batches.count_repeats([good(1)], step=0) == 0
    assert batches.count_repeats([good(1)], step=1) == 1
    with pytest.raises(DuplicatedBatch):
        batches.count_repeats([good(1)], step=2)
