"""`plan_batch` finds the oldest exact batch with all minimums, whenever one exists."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from grpo_api.planning.batch_plan import Demand, Kind, plan_batch

Least = dict[Kind, int]
LEAST = st.dictionaries(
    st.builds(Kind, st.sampled_from([0, 1]), st.integers(1, 4)), st.integers(1, 2), max_size=2
)


def queues(min_size: int, max_size: int, largest: int) -> st.SearchStrategy[list[Kind]]:
    """Draws groups from senders 0 and 1 and an unregistered one."""
    kinds = st.builds(Kind, st.sampled_from([0, 1, None]), st.integers(1, largest))
    return st.lists(kinds, min_size=min_size, max_size=max_size)


def plan(queue: list[Kind], batch_size: int, least: Least) -> list[int] | None:
    return plan_batch(queue, Demand(batch_size, least))


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
    assert plan(queue, batch_size, least) == oldest_valid(queue, batch_size, least)


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
    planned = plan([queue[i] for i in head], batch_size, least)
    whole = plan(queue, batch_size, least)
    assert whole == (None if planned is None else [head[i] for i in planned])


def test_a_deep_queue_with_many_minimums_is_planned() -> None:
    """20 environments with a batch's worth of groups each, and one with a minimum."""
    queue = [Kind(i % 20, 8) for i in range(20 * 128)]
    least = {Kind(env_id, 8): 6 for env_id in range(20)} | {Kind(3, 8): 14}
    planned = plan(queue, 1024, least)
    assert planned is not None
    assert Counter(i % 20 for i in planned) == {e: 14 if e == 3 else 6 for e in range(20)}
    assert max(planned) == 3 + 13 * 20
