"""`plan_batch` finds the oldest exact batch with all minimums, whenever one exists; minimum
allocations, and how far they are scaled down."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_api.planning.batch_plan import Demand, Kind, demand, plan_batch

Least = dict[Kind, int]
LEAST = st.dictionaries(
    st.builds(Kind, st.sampled_from([0, 1]), st.integers(1, 4)), st.integers(1, 2), max_size=2
)


def queues(min_size: int, max_size: int, largest: int) -> st.SearchStrategy[list[Kind]]:
    """Draws groups from senders 0 and 1 and an unregistered one."""
    kinds = st.builds(Kind, st.sampled_from([0, 1, None]), st.integers(1, largest))
    return st.lists(kinds, min_size=min_size, max_size=max_size)


def oldest_valid(queue: list[Kind], batch_size: int, least: Least) -> list[int] | None:
    """The same result, found by trying every subset."""
    valid = []
    for count in range(1, len(queue) + 1):
        for subset in combinations(range(len(queue)), count):
            held = Counter(queue[i] for i in subset)
            is_exact = sum(queue[i].sequences for i in subset) == batch_size
            if is_exact and all(held[kind] >= n for kind, n in least.items()):
                valid.append(list(subset))
    return min(valid, default=None)


@given(queue=queues(0, 9, largest=6), batch_size=st.integers(1, 16), least=LEAST)
def test_a_plan_is_the_oldest_of_all_valid_batches(
    queue: list[Kind], batch_size: int, least: Least
) -> None:
    assert plan_batch(queue, Demand(batch_size, least)) == oldest_valid(queue, batch_size, least)


@given(queue=queues(20, 40, largest=8), batch_size=st.integers(8, 24), least=LEAST)
def test_groups_behind_a_batch_of_each_kind_do_not_matter(
    queue: list[Kind], batch_size: int, least: Least
) -> None:
    """The store depends on this, because it reads only those groups."""
    seen: Counter[Kind] = Counter()
    head = []
    for position, kind in enumerate(queue):
        seen[kind] += 1
        if seen[kind] <= batch_size // kind.sequences:
            head.append(position)
    demanded = Demand(batch_size, least)
    planned = plan_batch([queue[i] for i in head], demanded)
    whole = plan_batch(queue, demanded)
    assert whole == (None if planned is None else [head[i] for i in planned])


def test_a_deep_queue_with_many_minimums_is_planned() -> None:
    """20 environments with a batch's worth of groups each, and one with a minimum."""
    queue = [Kind(i % 20, 8) for i in range(20 * 128)]
    least = {Kind(env_id, 8): 6 for env_id in range(20)} | {Kind(3, 8): 14}
    planned = plan_batch(queue, Demand(1024, least))
    assert planned is not None
    assert Counter(i % 20 for i in planned) == {e: 14 if e == 3 else 6 for e in range(20)}
    assert max(planned) == 3 + 13 * 20


BATCH_SIZE = 24
DIVISORS = [size for size in range(1, BATCH_SIZE + 1) if BATCH_SIZE % size == 0]
SHARES = st.lists(
    st.tuples(st.sampled_from(DIVISORS), st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9])), max_size=3
)


def groups_asked(
    batch_size: int, *shares: tuple[int, float], queued: dict[Kind, int] | None = None
) -> list[int]:
    """Minimum number of groups for each (group_size, minimum)."""
    asked = {Kind(env_id, size): minimum for env_id, (size, minimum) in enumerate(shares)}
    least = demand(batch_size, asked, queued or {}).least
    return [least.get(kind, 0) for kind in asked]


@pytest.mark.parametrize(
    ("batch_size", "shares", "asked"),
    [
        pytest.param(8, [(2, 0.6), (2, 0.0)], [2, 0], id="int(8 * 0.6) = 4 sequences"),
        pytest.param(8, [(4, 0.2)], [1], id="one sequence takes a whole group"),
        pytest.param(100, [(1, 0.29)], [28], id="int, as the archived server rounds"),
        pytest.param(10, [(1, 0.8), (1, 0.4)], [6, 3], id="a sum above one: one factor for all"),
        pytest.param(12, [(4, 0.3), (6, 0.5)], [0, 0], id="4 and 6 never add up to 12 together"),
        pytest.param(40, [(12, 0.5), (10, 0.5)], [0, 2], id="12 does not divide 40"),
    ],
)
def test_minimums_in_groups(
    batch_size: int, shares: list[tuple[int, float]], asked: list[int]
) -> None:
    assert groups_asked(batch_size, *shares) == asked


def test_queued_data_of_others_may_be_what_makes_a_minimum_fit() -> None:
    assert groups_asked(12, (4, 0.3), (6, 0.5), queued={Kind(None, 2): 1}) == [1, 1]
    assert groups_asked(12, (4, 0.3), (6, 0.5), queued={Kind(None, 3): 1}) == [0, 0]


def can_hold(sizes: list[int], least: list[int]) -> bool:
    """Whether any numbers of groups, each at least its minimum, fill the batch; tries all."""
    ranges = [range(n, BATCH_SIZE // s + 1) for s, n in zip(sizes, least, strict=True)]
    return not sizes or any(
        sum(n * s for n, s in zip(numbers, sizes, strict=True)) == BATCH_SIZE
        for numbers in product(*ranges)
    )


@given(shares=SHARES)
def test_minimums_are_scaled_down_by_one_factor_and_no_more_than_needed(
    shares: list[tuple[int, float]],
) -> None:
    sizes = [size for size, _ in shares]

    def scaled(step: int) -> list[int]:
        declared = [int(BATCH_SIZE * minimum) for _, minimum in shares]
        sequences = [-(-d * step // BATCH_SIZE) for d in declared]
        return [-(-s // size) for s, size in zip(sequences, sizes, strict=True)]

    largest_that_fits = max(step for step in range(BATCH_SIZE + 1) if can_hold(sizes, scaled(step)))
    assert groups_asked(BATCH_SIZE, *shares) == scaled(largest_that_fits)
