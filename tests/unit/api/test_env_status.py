"""The formulas of `/status-env`, by hand; environments that pause by it never stop the run."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.planning.batch_plan import Kind, plan_batch
from grpo_api.planning.run_view import (
    Environment,
    QueueLimits,
    RunView,
    environment_status,
)
from grpo_core.wire.run_api import EnvironmentRegistration, EnvironmentStatus

LIMITS = QueueLimits(queued_groups=100, queued_bytes=1000)
UNLIMITED = QueueLimits(queued_groups=2**53, queued_bytes=2**53)
BATCHES = 12
BATCHES_OFF_POLICY = 1
"""The smallest limit of an environment: it pauses when it sees one batch."""
SPEEDS = (0.05, 0.3, 1.0)


def environment(
    env_id: int,
    group_size: int = 4,
    *,
    minimum: float | None = None,
    weight: float = 1.0,
    max_token_length: int = 100,
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


class SimulatedRun:
    """run-api's planning, without Redis or HTTP."""

    def __init__(self, batch_size: int, environments: list[Environment]) -> None:
        self.batch_size = batch_size
        self.environments = environments
        self.queue: list[Kind] = []

    def view(self) -> RunView:
        queued = Counter(self.queue)
        largest = max((kind.sequences for kind in queued), default=1)
        return RunView(self.environments, 0, self.batch_size, queued, largest, 0, 0, num_steps=10)

    def may_send(self, own: Environment) -> bool:
        """The rule by which Atropos environments and ours pause."""
        queue_size = environment_status(own, self.view(), UNLIMITED).queue_size
        size = own.registration.group_size
        return queue_size * size < BATCHES_OFF_POLICY * self.batch_size

    def take_batch(self) -> list[Kind] | None:
        chosen = plan_batch(self.queue, self.view().demand())
        if chosen is None:
            return None
        batch = [self.queue[i] for i in chosen]
        self.queue = [kind for i, kind in enumerate(self.queue) if i not in chosen]
        return batch


@st.composite
def runs(draw: st.DrawFn) -> SimulatedRun:
    """Group sizes that fit one batch together, with minimums that may not fit."""
    batch_size = draw(st.sampled_from([8, 12, 16, 24, 40]))
    divisors = [size for size in range(1, batch_size + 1) if batch_size % size == 0]
    sizes = draw(st.lists(st.sampled_from(divisors), min_size=1, max_size=4))
    minimums = [draw(st.sampled_from([None, 0.2, 0.5, 0.8])) for _ in sizes]
    shares = enumerate(zip(sizes, minimums, strict=True))
    return SimulatedRun(
        batch_size, [environment(i, size, minimum=minimum) for i, (size, minimum) in shares]
    )


@settings(max_examples=60)
@given(run=runs(), dice=st.randoms(use_true_random=True))
def test_a_batch_comes_out_however_tightly_environments_pace(
    run: SimulatedRun, dice: random.Random
) -> None:
    speeds = [dice.choice(SPEEDS) for _ in run.environments]
    for _ in range(BATCHES):
        while (batch := run.take_batch()) is None:
            willing = [own for own in run.environments if run.may_send(own)]
            assert willing, f"everybody pauses at {run.view()}"
            sender = dice.choices(willing, [speeds[own.env_id] for own in willing])[0]
            run.queue.append(sender.kind)
        assert sum(kind.sequences for kind in batch) == run.batch_size
        most = len(run.environments) * (BATCHES_OFF_POLICY + 1) * run.batch_size
        assert sum(kind.sequences for kind in run.queue) <= most
