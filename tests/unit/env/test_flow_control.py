from __future__ import annotations

import pytest

from grpo_core.wire import EnvironmentStatus, TrainerInfo
from grpo_env.flow_control import Action, Load, Pace, Plan, plan_groups

PACE = Pace(group_size=8, max_batches_offpolicy=3, max_concurrent_groups=100, total_steps=50)
TRAINER = TrainerInfo(batch_size=64, max_token_len=2048)


def status(
    step: int = 0,
    queue: int = 0,
    weight: float = 1.0,
    own: int | None = None,
    pressure: float = 0.0,
) -> EnvironmentStatus:
    return EnvironmentStatus(
        current_step=step,
        queue_size=queue,
        unallocated_fraction=1.0,
        self_queue_size=queue if own is None else own,
        max_group_size=8,
        env_weight=weight,
        pressure=pressure,
    )


START, PAUSE, STOP = Action.START, Action.PAUSE, Action.STOP


@pytest.mark.parametrize(
    ("step", "queue", "in_flight", "sent", "expected"),
    [
        # Three batches of 64 are 24 groups of 8.
        (0, 0, 0, 0, Plan(START, 24)),
        (0, 10, 0, 0, Plan(START, 14)),
        (0, 10, 10, 0, Plan(START, 4)),
        (0, 10, 10, 4, Plan(PAUSE)),
        (0, 24, 0, 0, Plan(PAUSE)),
        (0, 40, 0, 0, Plan(PAUSE)),
        # Near the end: one batch left and one of margin are 16 groups.
        (49, 0, 0, 0, Plan(START, 16)),
        (49, 16, 0, 0, Plan(PAUSE)),
        # A full queue is no reason to stop while a batch is still to be delivered.
        (49, 100, 0, 0, Plan(PAUSE)),
        (50, 0, 0, 0, Plan(STOP)),
        (51, 0, 5, 0, Plan(STOP)),
    ],
)
def test_plan(step: int, queue: int, in_flight: int, sent: int, expected: Plan) -> None:
    assert plan_groups(status(step, queue), TRAINER, PACE, Load(in_flight, sent)) == expected


def test_concurrency_is_bounded_and_counts_what_is_in_flight() -> None:
    pace = Pace(8, 3, max_concurrent_groups=6, total_steps=50)

    assert plan_groups(status(), TRAINER, pace, Load(0)) == Plan(START, 6)
    assert plan_groups(status(), TRAINER, pace, Load(4)) == Plan(START, 2)
    assert plan_groups(status(), TRAINER, pace, Load(6)) == Plan(PAUSE)


@pytest.mark.parametrize(("weight", "groups"), [(0.5, 3), (0.01, 1)])
def test_slots_are_shared_by_weight_and_never_none(weight: float, groups: int) -> None:
    pace = Pace(8, 3, max_concurrent_groups=6, total_steps=50)

    assert plan_groups(status(weight=weight), TRAINER, pace, Load(0)) == Plan(START, groups)


@pytest.mark.parametrize(("pressure", "expected"), [(0.99, Plan(START, 1)), (1.0, Plan(PAUSE))])
def test_nothing_is_sampled_for_a_full_queue(pressure: float, expected: Plan) -> None:
    """Whatever this environment's own share says; its weight carries the pressure before that."""
    full = status(weight=0.01, pressure=pressure)
    pace = Pace(8, 3, max_concurrent_groups=6, total_steps=50)

    assert plan_groups(full, TRAINER, pace, Load(0)) == expected


@pytest.mark.parametrize(
    ("share", "queue", "own", "in_flight", "expected"),
    [
        # A quarter of the 24 groups that three batches hold are 6.
        (0.25, 24, 0, 0, Plan(START, 6)),
        (0.25, 24, 4, 0, Plan(START, 2)),
        (0.25, 24, 4, 2, Plan(PAUSE)),
        (0.25, 24, 6, 0, Plan(PAUSE)),
        # Where the queue as a whole is short, there is more to do than that.
        (0.25, 10, 6, 0, Plan(START, 14)),
        (0.0, 24, 0, 0, Plan(PAUSE)),
        # Rounded up: a share that is no whole group is not met by less than one.
        (0.01, 24, 0, 0, Plan(START, 1)),
    ],
)
def test_an_own_share_is_filled_however_much_the_others_have_queued(
    share: float, queue: int, own: int, in_flight: int, expected: Plan
) -> None:
    pace = Pace(8, 3, 100, 50, min_batch_allocation=share)

    assert plan_groups(status(queue=queue, own=own), TRAINER, pace, Load(in_flight)) == expected


def test_the_staleness_bound_never_starves_the_trainer_of_one_batch() -> None:
    # 1 x 12 sequences is one whole group of 8, which can never fill a batch.
    trainer = TrainerInfo(batch_size=12, max_token_len=10)

    assert plan_groups(status(), trainer, Pace(8, 1, 100, 50), Load(0)) == Plan(START, 2)


def test_nothing_is_started_while_no_trainer_is_registered() -> None:
    unregistered = TrainerInfo(batch_size=-1, max_token_len=-1)

    assert plan_groups(status(), unregistered, PACE, Load(0)) == Plan(PAUSE)


def test_a_run_of_no_steps_is_complete() -> None:
    assert plan_groups(status(), TRAINER, Pace(8, 3, 6, total_steps=0), Load(0)) == Plan(STOP)
