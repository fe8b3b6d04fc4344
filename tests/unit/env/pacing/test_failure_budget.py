"""Deadlines in seconds, measured by a clock that the test moves."""

from __future__ import annotations

import pytest

from grpo_core.errors import ServiceUnavailable
from grpo_env.pacing.failure_budget import EveryGroupRefused, FailureBudget, RefusalLimit
from grpo_env.registration import ENDLESS, Membership, NoTrainer, StallDetector


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_failures_in_a_row_are_allowed_until_the_deadline_after_the_first() -> None:
    clock = Clock()
    budget = FailureBudget("vllm-server", 10.0, clock)

    budget.failed(ServiceUnavailable("one"))
    clock.now += 9.0
    budget.succeeded()
    assert budget.delay_s == 0.0
    clock.now += 9.0
    budget.failed(ServiceUnavailable("two"))
    assert budget.delay_s == pytest.approx(0.2)
    clock.now += 9.9
    budget.failed(ServiceUnavailable("three"))
    assert budget.delay_s == pytest.approx(5.0)
    clock.now += 0.1
    with pytest.raises(ServiceUnavailable, match=r"no request successfully for 10 s.*four"):
        budget.failed(ServiceUnavailable("four"))


def test_sixteen_refusals_in_a_row_are_a_wrong_setting() -> None:
    limit = RefusalLimit("run-api")
    for _ in range(15):
        limit.refused("no")
    limit.accepted()
    for _ in range(15):
        limit.refused("no")

    with pytest.raises(EveryGroupRefused, match=r"run-api refused 16 groups in a row.*context"):
        limit.refused("beyond the context")


def test_a_stall_is_allowed_until_the_deadline() -> None:
    clock = Clock()
    stall = StallDetector(10.0, clock)
    stall.observe(step=3, idle=True)
    # A new step, or work in progress, restarts the deadline.
    for step, idle in ((4, True), (4, False), (4, True)):
        clock.now += 9.9
        stall.observe(step, idle)
    clock.now += 0.1
    with pytest.raises(NoTrainer, match="the trainer took no batch for 10 s"):
        stall.observe(step=4, idle=True)


def test_a_trainer_that_names_no_number_of_steps_leaves_the_run_open() -> None:
    member = Membership(env_id=0, wandb_name="n", starting_step=0, num_steps=-1)
    assert (member.total_steps(own=-1), member.total_steps(own=5)) == (ENDLESS, 5)
