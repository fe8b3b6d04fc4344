"""Minimum allocations: what is asked of a batch, and how far it is scaled down."""

from __future__ import annotations

import random
from itertools import product

import pytest

from grpo_api.demand import Share, demand
from grpo_api.exact_sums import Kind


def groups_asked(
    batch_size: int, *shares: tuple[int, float], queued: dict[Kind, int] | None = None
) -> list[int]:
    """Groups that each (group_size, minimum) is granted."""
    asked = [Share(env_id, size, minimum) for env_id, (size, minimum) in enumerate(shares)]
    least = demand(batch_size, asked, queued or {}).least
    return [least.get(share.kind, 0) for share in asked]


@pytest.mark.parametrize(
    ("batch_size", "shares", "asked"),
    [
        pytest.param(8, [(2, 0.5)], [2], id="int(8 * 0.5) sequences"),
        pytest.param(8, [(2, 0.6), (2, 0.0)], [2, 0], id="int(8 * 0.6) = 4"),
        pytest.param(8, [(4, 0.1)], [0], id="int(8 * 0.1) = 0 asks for nothing"),
        pytest.param(8, [(4, 0.2)], [1], id="one sequence takes a whole group"),
        pytest.param(100, [(1, 0.29)], [28], id="int, as the archived server rounds"),
        pytest.param(8, [(2, 0.75), (2, 0.75)], [2, 2], id="a sum above one"),
        pytest.param(10, [(1, 0.8), (1, 0.4)], [6, 3], id="scaled by one factor"),
        pytest.param(10, [(1, 1.0), (1, 0.1)], [9, 1], id="the smaller one keeps something"),
        pytest.param(8, [(4, 0.3), (4, 0.3), (4, 0.3)], [0, 0, 0], id="not even one group of each"),
        pytest.param(12, [(4, 0.3), (6, 0.5)], [0, 0], id="4 and 6 never add up to 12 together"),
        pytest.param(8, [(8, 0.5), (4, 0.5)], [0, 0], id="a group that takes the whole batch"),
        pytest.param(16, [(8, 0.6), (4, 0.4)], [1, 2], id="rounding up to groups would overfill"),
        pytest.param(40, [(12, 0.5), (8, 0.1)], [2, 1], id="sizes that need each other"),
        pytest.param(40, [(12, 0.5), (10, 0.5)], [0, 2], id="a size that nobody complements"),
    ],
)
def test_minimums_in_groups(
    batch_size: int, shares: list[tuple[int, float]], asked: list[int]
) -> None:
    assert groups_asked(batch_size, *shares) == asked


def test_queued_data_of_others_may_be_what_makes_a_minimum_fit() -> None:
    assert groups_asked(10, (6, 0.5)) == [0]
    assert groups_asked(10, (6, 0.5), queued={Kind(None, 4): 1}) == [1]
    assert groups_asked(10, (6, 0.5), queued={Kind(None, 2): 1}) == [0]


def can_hold(batch_size: int, sizes: list[int], least: list[int]) -> bool:
    """Some numbers of groups, none below its least, fill the batch: by trying all."""
    ranges = [range(n, batch_size // s + 1) for s, n in zip(sizes, least, strict=True)]
    return any(
        sum(n * s for n, s in zip(numbers, sizes, strict=True)) == batch_size
        for numbers in product(*ranges)
    )


def test_what_is_asked_fits_and_is_as_declared_where_that_fits() -> None:
    for seed in range(200):
        dice = random.Random(seed)
        batch_size = dice.choice([6, 8, 12, 16, 24])
        divisors = [d for d in range(1, batch_size + 1) if batch_size % d == 0]
        sizes = [dice.choice(divisors) for _ in range(3)]
        minimums = [dice.choice([0.0, 0.1, 0.25, 0.5, 0.9]) for _ in sizes]
        declared = [-(-int(batch_size * m) // s) for s, m in zip(sizes, minimums, strict=True)]
        asked = groups_asked(batch_size, *zip(sizes, minimums, strict=True))
        assert can_hold(batch_size, sizes, asked), f"seed {seed}"
        assert all(a <= d for a, d in zip(asked, declared, strict=True)), f"seed {seed}"
        if can_hold(batch_size, sizes, declared):
            assert asked == declared, f"seed {seed}"
