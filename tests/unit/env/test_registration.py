from __future__ import annotations

import pytest

from grpo_env.registration import ENDLESS, AfterTheEnd, Membership, NoTrainer, Standstill
from tests.unit.env.clock import Clock


def test_standing_still_is_borne_until_the_deadline() -> None:
    clock = Clock()
    standstill = Standstill(10.0, clock)
    standstill.look(step=3, idle=True)
    # A step, or work to do, starts the count again.
    for step, idle in ((4, True), (4, False), (4, True)):
        clock.now += 9.9
        standstill.look(step, idle)
    clock.now += 0.1
    with pytest.raises(NoTrainer, match="no batch was taken for 10 s"):
        standstill.look(step=4, idle=True)


@pytest.mark.parametrize(
    ("own", "trainers", "expected"), [(-1, 7, 7), (5, 7, 5), (-1, -1, ENDLESS), (-1, 0, ENDLESS)]
)
def test_the_own_setting_ends_the_run_or_else_the_trainers_latest_word(
    own: int, trainers: int, expected: int
) -> None:
    def joined(num_steps: int) -> Membership:
        return Membership(env_id=0, wandb_name="n", starting_step=0, num_steps=num_steps)

    assert joined(trainers).total_steps(own) == expected
    assert joined(3).total_steps(own, latest=trainers) == expected


def test_a_complete_run_is_waited_for_until_the_deadline() -> None:
    clock = Clock()
    after_the_end = AfterTheEnd(10.0, clock)
    clock.now += 1000.0  # until it was first asked
    assert after_the_end.waits(groups_sent=0)
    clock.now += 9.9
    assert after_the_end.waits(groups_sent=0)
    clock.now += 0.1
    assert not after_the_end.waits(groups_sent=0)


@pytest.mark.parametrize(("deadline_s", "groups_sent"), [(0.0, 0), (10.0, 1)])
def test_an_environment_that_sent_groups_or_was_not_told_to_wait_leaves(
    deadline_s: float, groups_sent: int
) -> None:
    assert not AfterTheEnd(deadline_s, Clock()).waits(groups_sent)
