"""`plan_batch` finds the oldest exact batch with all minimums, whenever one exists."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from grpo_api.planning.batch_plan import Bundle, Demand, plan_batch
from grpo_api.planning.subset_sum import Kind
from tests.unit.api.builders import bundle, queues

Least = dict[Kind, int]
LEAST = st.dictionaries(
    st.builds(Kind, st.sampled_from([0, 1]), st.integers(1, 4)), st.integers(1, 2), max_size=2
)


def plan(queue: list[Bundle], batch_size: int, least: Least | None = None) -> list[int] | None:
    planned = plan_batch(queue, Demand(batch_size, least or {}))
    return None if planned is None else [bundle.id for bundle in planned]


def oldest_valid(queue: list[Bundle], batch_size: int, least: Least) -> list[int] | None:
    """The same result, found by trying every subset."""
    valid = []
    for count in range(1, len(queue) + 1):
        for subset in combinations(queue, count):
            held = Counter(bundle.kind for bundle in subset)
            is_exact = sum(bundle.sequences for bundle in subset) == batch_size
            if is_exact and all(held[kind] >= n for kind, n in least.items()):
                valid.append([bundle.id for bundle in subset])
    return min(valid, default=None)


@given(queue=queues(0, 9, largest=3), batch_size=st.integers(1, 16), least=LEAST)
def test_a_plan_is_the_oldest_of_all_valid_batches(
    queue: list[Bundle], batch_size: int, least: Least
) -> None:
    assert plan(queue, batch_size, least) == oldest_valid(queue, batch_size, least)


@given(queue=queues(20, 40, largest=4), batch_size=st.integers(8, 24), least=LEAST)
def test_bundles_behind_a_batch_of_each_kind_do_not_matter(
    queue: list[Bundle], batch_size: int, least: Least
) -> None:
    """The store depends on this, because it reads only those bundles."""
    seen: Counter[Kind] = Counter()
    head = []
    for candidate in queue:
        seen[candidate.kind] += 1
        if seen[candidate.kind] <= batch_size // candidate.sequences:
            head.append(candidate)
    assert plan(head, batch_size, least) == plan(queue, batch_size, least)


def test_a_deep_queue_with_many_minimums_is_planned() -> None:
    """20 environments with a batch's worth of groups each, and one with a minimum."""
    queue = [bundle(i, i % 20, 8) for i in range(20 * 128)]
    least = {Kind(env_id, 8): 6 for env_id in range(20)} | {Kind(3, 8): 14}
    planned = plan(queue, 1024, least)
    assert planned is not None
    assert Counter(i % 20 for i in planned) == {e: 14 if e == 3 else 6 for e in range(20)}
    assert max(planned) == 3 + 13 * 20
