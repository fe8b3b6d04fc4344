"""The formulas of `/status-env`, calculated by hand, and the cases that would stop a run."""

from __future__ import annotations

import pytest

from grpo_api.planning.batch_plan import Kind
from grpo_api.planning.run_view import (
    Environment,
    Limits,
    RunView,
    environment_status,
)
from grpo_core.wire.run_api import EnvironmentStatus
from tests.unit.api.builders import environment

LIMITS = Limits(queued_groups=100, queued_bytes=1000)


def view(
    environments: list[Environment],
    queued: dict[tuple[int | None, int], int],
    max_group_size: int = 4,
    batch_size: int = 16,
    fill: tuple[int, int] = (0, 0),
) -> RunView:
    """`queued`: number of groups by sender and size. `fill`: queued groups, stored bytes."""
    kinds = {Kind(*kind): n for kind, n in queued.items()}
    return RunView(environments, 7, batch_size, kinds, max_group_size, *fill, num_steps=50)


def statuses(run: RunView) -> list[EnvironmentStatus]:
    return [environment_status(own, run, LIMITS) for own in run.environments]


def queue_sizes(run: RunView) -> list[int]:
    return [status.queue_size for status in statuses(run)]


def test_one_environment() -> None:
    (status,) = statuses(view([environment(0)], {(0, 4): 2, (0, 3): 1}))
    assert status == EnvironmentStatus(
        current_step=7,
        queue_size=2,  # 11 // 4
        unallocated_fraction=1.0,
        self_queue_size=2,
        max_group_size=4,
        env_weight=1.0,
        num_steps=50,
    )


def test_groups_of_others_beyond_their_minimum_count_in_whole_packs() -> None:
    environments = [environment(0), environment(1, minimum=0.25), environment(2)]
    # 1: ceil(12 / 4) * 4 - int(16 * 0.25) = 8; 2: ceil(5 / 4) * 4 = 8; unregistered: 4
    queued = {(0, 4): 1, (1, 4): 3, (2, 4): 1, (2, 1): 1, (None, 4): 1}
    status, *_ = statuses(view(environments, queued))
    assert status.queue_size == (4 + 8 + 8 + 4) // 4
    assert status.self_queue_size == 1
    assert status.unallocated_fraction == pytest.approx(0.75)


def test_a_minimum_of_a_disconnected_environment_is_not_reserved() -> None:
    environments = [environment(0), environment(1, minimum=0.5, connected=False)]
    status, _ = statuses(view(environments, {(1, 4): 2}))
    assert (status.queue_size, status.unallocated_fraction) == (2, 1.0)


@pytest.mark.parametrize(
    ("environments", "weight"),
    [
        pytest.param([environment(0), environment(1, weight=3.0)], 0.25, id="weights"),
        pytest.param([environment(0, max_token_length=300), environment(1)], 0.75, id="lengths"),
        pytest.param([environment(0), environment(1, weight=1e6)], 0.01, id="never starved"),
        pytest.param([environment(0), environment(1, connected=False)], 1.0, id="one is gone"),
        pytest.param([environment(0, weight=-1), environment(1)], 1.0, id="ignored for itself"),
        pytest.param([environment(0), environment(1, weight=-1)], 1.0, id="ignored for others"),
    ],
)
def test_weight(environments: list[Environment], weight: float) -> None:
    assert statuses(view(environments, {}))[0].env_weight == pytest.approx(weight)


def test_only_those_whose_minimum_is_missing_go_on() -> None:
    environments = [environment(0), environment(1, minimum=0.25), environment(2, minimum=0.25)]
    # 0: its own 36 + 1's groups beyond its minimum; 1: its own 4 + 36; 2: no own groups
    assert queue_sizes(view(environments, {(0, 4): 9, (1, 4): 1})) == [9, 10, 0]


@pytest.mark.parametrize(
    ("fill", "pressure"),
    [
        ((50, 500), 0.0),
        ((75, 0), 0.5),
        ((0, 900), 0.8),
    ],
)
def test_a_queue_that_fills_up_slows_everybody(fill: tuple[int, int], pressure: float) -> None:
    both = [environment(0), environment(1)]
    status, _ = statuses(view(both, {(0, 4): 4, (1, 4): 4}, fill=fill))
    assert status.pressure == pytest.approx(pressure)
    assert status.env_weight == pytest.approx(max(0.01, 0.5 * (1 - pressure)))


def test_a_full_queue_does_not_slow_the_one_that_the_next_batch_waits_for() -> None:
    both = [environment(0), environment(1, minimum=0.5)]
    slowed, waited_for = statuses(view(both, {(0, 4): 100}, fill=(100, 0)))
    assert slowed.pressure == 1.0
    assert (waited_for.pressure, waited_for.env_weight) == (0.0, 0.5)
