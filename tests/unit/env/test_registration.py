from __future__ import annotations

import pytest

from grpo_env.registration import ENDLESS, AfterTheEnd, Membership, NoTrainer, Standstill


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_standing_still_is_borne_until_the_deadline() -> None:
    clock = Clock()
    standstill = Standstill(10.0, clock)
    standstill.look(step=3, idle=True)
    clock.now += 9.9
    standstill.look(step=3, idle=True)
    clock.now += 0.1
    with pytest.raises(NoTrainer, match="no batch was taken for 10 s"):
        standstill.look(step=3, idle=True)


@pytest.mark.parametrize(("step", "idle"), [(4, True), (3, False)])
def test_a_step_or_work_to_do_starts_the_count_again(step: int, idle: bool) -> None:
    clock = Clock()
    standstill = Standstill(10.0, clock)
    standstill.look(step=3, idle=True)
    clock.now += 9.9
    standstill.look(step, idle)
    clock.now += 9.9
    standstill.look(step, idle=True)


@pytest.mark.parametrize(
    ("own", "trainers", "expected"), [(-1, 7, 7), (5, 7, 5), (-1, -1, ENDLESS), (-1, 0, ENDLESS)]
)
def test_where_the_run_ends(own: int, trainers: int, expected: int) -> None:
    membership = Membership(env_id=0, wandb_name="n", starting_step=0, num_steps=trainers)
    assert membership.total_steps(own) == expected
    membership = Membership(env_id=0, wandb_name="n", starting_step=0, num_steps=3)
    assert membership.total_steps(own, latest=trainers) == expected


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
def test_who_has_sent_groups_or_is_not_asked_to_wait_leaves(
    deadline_s: float, groups_sent: int
) -> None:
    assert not AfterTheEnd(deadline_s, Clock()).waits(groups_sent)
