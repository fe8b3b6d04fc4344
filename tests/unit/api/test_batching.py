"""Planning: exact batches, oldest first, never a stall where an exact batch exists."""

from __future__ import annotations

from itertools import combinations, combinations_with_replacement

import pytest

from grpo_api.batching import QueuedGroup, plan_batch


def queue_of(*sizes: int) -> list[QueuedGroup]:
    return [QueuedGroup(i, env_id=0, sequences=n, stored_bytes=1) for i, n in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "batch_size", "planned"),
    [
        pytest.param([], 4, None, id="empty"),
        pytest.param([4, 4, 4], 16, None, id="too little"),
        pytest.param([4, 4, 4], 8, [0, 1], id="equal sizes: the head"),
        pytest.param([8, 8], 8, [0], id="a group that fills the batch"),
        pytest.param([1] * 5, 4, [0, 1, 2, 3], id="single sequences"),
        pytest.param([4, 2, 4, 2], 8, [0, 1, 3], id="what does not fit waits"),
        pytest.param([4, 6, 6], 12, [1, 2], id="the oldest waits where it fits no batch"),
        pytest.param([4, 6, 3, 4, 4], 12, [0, 3, 4], id="a greedy choice would stall"),
        pytest.param([16, 4, 4], 8, [1, 2], id="a group larger than the batch"),
        pytest.param([3, 3, 3], 8, None, id="no exact subset"),
    ],
)
def test_plan(sizes: list[int], batch_size: int, planned: list[int] | None) -> None:
    assert plan_batch(queue_of(*sizes), batch_size) == planned


@pytest.mark.parametrize(
    "sizes", [[4, 6, 3, 4, 2, 6], [5, 5, 3, 4, 1], [2, 3, 4, 6, 12], [6, 4, 4, 4, 6]]
)
def test_plan_is_the_first_exact_subset_in_order_of_age(sizes: list[int]) -> None:
    exact = [
        subset
        for count in range(1, len(sizes) + 1)
        for subset in combinations(range(len(sizes)), count)
        if sum(sizes[i] for i in subset) == 12
    ]
    assert plan_batch(queue_of(*sizes), 12) == (list(min(exact)) if exact else None)


def test_long_queue_of_mixed_sizes_is_planned_quickly() -> None:
    queue = queue_of(*([4] * 3 + [6] * 20_000))
    assert plan_batch(queue, 38) == [0, 1, 3, 4, 5, 6, 7]  # 2 * 4 + 5 * 6


def test_as_many_groups_as_a_batch_has_sequences_always_hold_one() -> None:
    """What the dispatcher relies on when it reads no further than that."""
    for sizes in combinations_with_replacement([1, 2, 3, 4, 6, 12], 12):
        assert plan_batch(queue_of(*sizes), 12) is not None
