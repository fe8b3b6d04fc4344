"""How many groups are started, and which failures end the environment. Deadlines are in seconds,
measured by a clock that the test moves."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from grpo_core.errors import ServiceUnavailable
from grpo_core.wire.run_api import EnvironmentStatus, TrainerInfo
from grpo_env.pacing import (
    FIRST_GROUPS,
    EveryGroupRefused,
    FailureBudget,
    FlatRewards,
    Load,
    NoTrainer,
    RefusalLimit,
    RewardFailures,
    RewardsFail,
    StallDetector,
    groups_to_start,
    run_is_complete,
)
from grpo_env.registration import ENDLESS, Membership
from grpo_env.settings import EnvServerSettings

ENV = EnvServerSettings(
    task="arithmetic", model="m", group_size=8, max_batches_offpolicy=3, max_concurrent_groups=64
)
TOTAL_STEPS = 50
TRAINER = TrainerInfo(batch_size=64, max_token_len=2048)
STATUS = EnvironmentStatus(
    current_step=0,
    queue_size=0,
    unallocated_fraction=1.0,
    self_queue_size=0,
    max_group_size=8,
    env_weight=1.0,
    pressure=0.0,
)


def decide(
    load: Load, *, env: EnvServerSettings = ENV, trainer: TrainerInfo = TRAINER, **status: Any
) -> int:
    return groups_to_start(STATUS.model_copy(update=status), trainer, env, TOTAL_STEPS, load)


@pytest.mark.parametrize(
    ("step", "queue", "load", "expected"),
    [
        # Three batches of 64 sequences are 24 groups of 8.
        (0, 0, Load(0), 24),
        (0, 10, Load(10), 4),
        (0, 10, Load(10, sent_since_status=4), 0),
        # Near the end, one remaining batch and one batch of margin are 16 groups.
        (49, 0, Load(0), 16),
        # A queue that holds enough does not complete the run until the last batch is delivered.
        (49, 100, Load(0), 0),
    ],
)
def test_the_queue_is_filled_until_the_last_batch_is_delivered(
    step: int, queue: int, load: Load, expected: int
) -> None:
    assert decide(load, current_step=step, queue_size=queue) == expected
    assert not run_is_complete(STATUS.model_copy(update={"current_step": step}), TOTAL_STEPS)


def test_a_run_is_complete_once_its_last_batch_is_delivered() -> None:
    assert run_is_complete(STATUS.model_copy(update={"current_step": 50}), TOTAL_STEPS)


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
    env = ENV.model_copy(update={"max_concurrent_groups": slots})
    groups = decide(Load(in_flight, sent), env=env, queue_size=queue, env_weight=weight)

    assert groups >= 0
    if groups:
        assert in_flight + groups <= max(1, slots * weight)
        assert (queue + in_flight + sent + groups) * 8 <= 3 * 64


@pytest.mark.parametrize(
    ("load", "expected"),
    # Three batches hold 24 groups.
    [
        (Load(0, kept_share=0.75), 32),
        (Load(23, kept_share=0.99), 1),  # 24 / 0.99 is nearer to 24 than to 25
        (Load(0, sent_since_status=23, kept_share=0.99), 2),  # at least one must be kept
        (Load(0, kept_share=0.01), 48),
    ],
)
def test_replacements_of_dropped_groups_are_started_with_the_others(
    load: Load, expected: int
) -> None:
    assert decide(load) == expected


@pytest.mark.parametrize(
    ("weight", "pressure", "expected"),
    [(0.5, 0.0, 3), (0.01, 0.99, 1), (0.01, 1.0, 0)],
)
def test_slots_are_shared_by_weight_and_none_is_left_only_by_a_full_queue(
    weight: float, pressure: float, expected: int
) -> None:
    six = ENV.model_copy(update={"max_concurrent_groups": 6})
    assert decide(Load(0), env=six, env_weight=weight, pressure=pressure) == expected


@pytest.mark.parametrize(
    ("queue", "own", "in_flight", "expected"),
    # If the whole queue is short, the environment starts more than its own share.
    [(24, 4, 0, 2), (24, 4, 2, 0), (10, 6, 0, 14)],
)
def test_an_own_share_is_filled_however_much_the_others_have_queued(
    queue: int, own: int, in_flight: int, expected: int
) -> None:
    # Three batches hold 24 groups, and a quarter of them is 6.
    env = ENV.model_copy(update={"min_batch_allocation": 0.25})
    assert decide(Load(in_flight), env=env, queue_size=queue, self_queue_size=own) == expected


def test_the_staleness_bound_never_starves_the_trainer_of_one_batch() -> None:
    # A bound of 12 sequences is one whole group of 8, which can never fill a batch.
    trainer = TrainerInfo(batch_size=12, max_token_len=10)
    env = ENV.model_copy(update={"max_batches_offpolicy": 1})
    assert decide(Load(0), trainer=trainer, env=env) == 2


def test_nothing_is_started_while_no_trainer_is_registered() -> None:
    assert decide(Load(0), trainer=TrainerInfo(batch_size=-1, max_token_len=-1)) == 0


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
    with pytest.raises(RewardsFail):
        few.failed("boom")
