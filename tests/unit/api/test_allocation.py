"""The formulas of `/status-env`, worked by hand."""

from __future__ import annotations

import pytest

from grpo_api.allocation import Environment, RunCounters, environment_status
from grpo_core.wire import EnvironmentRegistration, EnvironmentStatus


def environment(
    env_id: int,
    weight: float = 1.0,
    max_token_length: int = 100,
    group_size: int = 4,
    minimum: float | None = None,
    connected: bool = True,
) -> Environment:
    registration = EnvironmentRegistration(
        max_token_length=max_token_length,
        desired_name="e",
        weight=weight,
        group_size=group_size,
        min_batch_allocation=minimum,
    )
    return Environment(env_id, f"e_{env_id}", connected, registration)


def counters(
    sequences_by_env: dict[int | None, int], max_group_size: int = 4, batch_size: int = 16
) -> RunCounters:
    return RunCounters(7, batch_size, sequences_by_env, max_group_size)


def status_of_first(environments: list[Environment], state: RunCounters) -> EnvironmentStatus:
    return environment_status(environments[0], environments, state)


def test_one_environment() -> None:
    assert status_of_first([environment(0)], counters({0: 11})) == EnvironmentStatus(
        current_step=7,
        queue_size=2,  # 11 // 4
        unallocated_fraction=1.0,
        self_queue_size=2,
        max_group_size=4,
        env_weight=1.0,
    )


def test_what_others_hold_beyond_their_minimum_counts_in_whole_packs() -> None:
    environments = [environment(0), environment(1, minimum=0.25), environment(2)]
    # 1: ceil(9 / 4) * 4 - int(16 * 0.25) = 8; 2: ceil(5 / 4) * 4 = 8; nobody's: 4
    state = counters({0: 4, 1: 9, 2: 5, None: 4})
    status = status_of_first(environments, state)
    assert status.queue_size == (4 + 8 + 8 + 4) // 4
    assert status.self_queue_size == 1
    assert status.unallocated_fraction == pytest.approx(0.75)


def test_others_do_not_count_in_groups_of_one() -> None:
    state = counters({0: 3, 1: 50}, max_group_size=1)
    assert status_of_first([environment(0, group_size=1), environment(1)], state).queue_size == 3


def test_a_minimum_of_a_disconnected_environment_is_not_reserved() -> None:
    environments = [environment(0), environment(1, minimum=0.5, connected=False)]
    status = status_of_first(environments, counters({1: 8}))
    assert status.queue_size == 2
    assert status.unallocated_fraction == 1.0


def test_minimums_over_one_leave_nothing() -> None:
    environments = [environment(0, minimum=0.7), environment(1, minimum=0.7)]
    assert status_of_first(environments, counters({})).unallocated_fraction == 0.0


@pytest.mark.parametrize(
    ("environments", "weight"),
    [
        ([environment(0), environment(1, weight=3.0)], 0.25),
        ([environment(0, max_token_length=300), environment(1)], 0.75),
        ([environment(0), environment(1, weight=1e6)], 0.01),
        ([environment(0), environment(1, connected=False)], 1.0),
        ([environment(0, weight=0.0), environment(1, weight=0.0)], 0.01),
        ([environment(0, connected=False)], 0.01),
    ],
    ids=["weights", "lengths", "floor", "disconnected", "no weight at all", "nobody connected"],
)
def test_weight(environments: list[Environment], weight: float) -> None:
    assert status_of_first(environments, counters({})).env_weight == pytest.approx(weight)
