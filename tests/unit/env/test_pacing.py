"""How many groups are started, and which failures end the environment. Deadlines are in seconds,
measured by a clock that the test moves."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.errors import ServiceUnavailable
from grpo_core.wire.run_api import EnvironmentStatus
from grpo_env.pacing import (
    EveryGroupRefused,
    FailureBudget,
    NoTrainer,
    RewardFailures,
    RewardsFail,
    RolloutsFail,
    StallDetector,
    groups_to_start,
)
from grpo_env.registration import ENDLESS, Membership

ENV = {"max_batches_offpolicy": 3, "max_concurrent_groups": 64, "min_batch_allocation": 0.0}
STATUS = EnvironmentStatus(
    **{"current_step": 0, "queue_size": 0, "self_queue_size": 0, "max_group_size": 8},
    **{"unallocated_fraction": 1.0, "env_weight": 1.0, "pressure": 0.0},
)


def decide(
    load: dict[str, Any], *, env: dict[str, Any] | None = None, batch_size: int = 64, **status: Any
) -> int:
    told = STATUS.model_copy(update=status)
    return groups_to_start(told, batch_size, 8, 50, **(ENV | (env or {}) | load))


QUARTER, SIX_SLOTS = {"min_batch_allocation": 0.25}, {"max_concurrent_groups": 6}


@pytest.mark.parametrize(
    ("expected", "load", "given"),
    [
        # The queue is filled: three batches of 64 sequences are 24 groups of 8.
        (24, {"in_flight": 0}, {}),
        (4, {"in_flight": 10}, {"queue_size": 10}),
        (0, {"in_flight": 10, "sent_since_status": 4}, {"queue_size": 10}),
        # Near the end, one remaining batch and one batch of margin are 16 groups.
        (16, {"in_flight": 0}, {"current_step": 49}),
        (0, {"in_flight": 0}, {"current_step": 49, "queue_size": 100}),
        # Replacements of dropped groups are started with the others.
        (32, {"in_flight": 0, "kept_share": 0.75}, {}),
        (1, {"in_flight": 23, "kept_share": 0.99}, {}),  # 24 / 0.99 is nearer to 24 than to 25
        (
            2,
            {"in_flight": 0, "sent_since_status": 23, "kept_share": 0.99},
            {},
        ),  # at least one must be kept
        (48, {"in_flight": 0, "kept_share": 0.01}, {}),
        # Slots are shared by weight, and none is left only by a full queue.
        (3, {"in_flight": 0}, {"env": SIX_SLOTS, "env_weight": 0.5, "pressure": 0.0}),
        (1, {"in_flight": 0}, {"env": SIX_SLOTS, "env_weight": 0.01, "pressure": 0.99}),
        (0, {"in_flight": 0}, {"env": SIX_SLOTS, "env_weight": 0.01, "pressure": 1.0}),
        # The own share, 6 of 24 groups, is filled however much the others have queued. If the whole
        # queue is short, the environment starts more than its own share.
        (2, {"in_flight": 0}, {"env": QUARTER, "queue_size": 24, "self_queue_size": 4}),
        (0, {"in_flight": 2}, {"env": QUARTER, "queue_size": 24, "self_queue_size": 4}),
        (14, {"in_flight": 0}, {"env": QUARTER, "queue_size": 10, "self_queue_size": 6}),
        # A bound of 12 sequences is one whole group of 8, which can never fill a batch.
        (2, {"in_flight": 0}, {"batch_size": 12, "env": {"max_batches_offpolicy": 1}}),
        # No trainer is registered.
        (0, {"in_flight": 0}, {"batch_size": -1}),
    ],
)
def test_groups_to_start(expected: int, load: dict[str, Any], given: dict[str, Any]) -> None:
    assert decide(load, **given) == expected


@given(
    queue=st.integers(0, 30),
    in_flight=st.integers(0, 10),
    sent=st.integers(0, 10),
    weight=st.floats(0.0, 1.0),
    slots=st.integers(1, 30),
)
def test_neither_concurrency_nor_staleness_passes_its_bound(
    queue: int, in_flight: int, sent: int, weight: float, slots: int
) -> None:
    env = {"max_concurrent_groups": slots}
    groups = decide(
        {"in_flight": in_flight, "sent_since_status": sent},
        env=env,
        queue_size=queue,
        env_weight=weight,
    )
    assert groups >= 0
    if groups:
        assert in_flight + groups <= max(1, slots * weight)
        assert (queue + in_flight + sent + groups) * 8 <= 3 * 64


def test_failures_in_a_row_are_allowed_until_the_deadline_after_the_first() -> None:
    now = 100.0
    budget = FailureBudget("vllm-server", 10.0, lambda: now)
    budget.failed(ServiceUnavailable("one"))
    now += 9.0
    budget.succeeded()
    assert budget.delay_s == 0.0
    for passed_s, delay_s in ((9.0, 0.2), (9.9, 5.0)):
        now += passed_s
        budget.failed(ServiceUnavailable("two"))
        assert budget.delay_s == pytest.approx(delay_s)
    now += 0.1
    with pytest.raises(ServiceUnavailable, match=r"no request successfully for 10 s.*four"):
        budget.failed(ServiceUnavailable("four"))


def test_sixteen_refusals_in_a_row_are_a_wrong_setting() -> None:
    budget = FailureBudget("run-api", 10.0)
    for _ in range(2):
        budget.succeeded()
        for _ in range(15):
            budget.refused("no")
    with pytest.raises(EveryGroupRefused, match=r"run-api refused 16 groups in a row.*context"):
        budget.refused("beyond the context")


def test_a_stall_is_allowed_until_the_deadline() -> None:
    now = 100.0
    stall = StallDetector(10.0, lambda: now)
    stall.observe(step=3, idle=True)
    # A new step, or work in progress, restarts the deadline.
    for step, idle in ((4, True), (4, False), (4, True)):
        now += 9.9
        stall.observe(step, idle)
    now += 0.1
    with pytest.raises(NoTrainer, match="the trainer took no batch for 10 s"):
        stall.observe(step=4, idle=True)


def test_a_trainer_that_names_no_number_of_steps_leaves_the_run_open() -> None:
    member = Membership(env_id=0, wandb_name="n", starting_step=0, num_steps=-1)
    assert (member.total_steps(own=-1), member.total_steps(own=5)) == (ENDLESS, 5)


def test_a_share_of_failed_groups_ends_the_run_by_name_but_few_groups_prove_nothing() -> None:
    failures = RewardFailures(share=0.5)
    for _ in range(4):
        failures.graded()
        failures.failed("boom")
    with pytest.raises(RewardsFail, match=r"5 of the last 9 groups.*the last problem was: boom"):
        failures.failed("boom")
    few = RewardFailures(share=0.0)
    for _ in range(7):
        few.failed("boom")
    with pytest.raises(RolloutsFail, match=r"a rollout failed for 8 of.*agent; try a rollout"):
        few.failed("agent", of_rollout=True)
