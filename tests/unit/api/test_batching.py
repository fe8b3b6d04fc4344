"""Planning: exact batches that hold the minimums, oldest first, never a stall where one exists."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations

import pytest

from grpo_api.batching import plan_batch
from grpo_api.bundles import Bundle, StoredGroup
from grpo_api.demand import Demand
from grpo_api.exact_sums import Kind


def bundle(id_: int, env_id: int | None, *sizes: int) -> Bundle:
    return Bundle(id_, env_id, tuple(StoredGroup(id_, size, stored_bytes=1) for size in sizes))


def queue_of(*sizes: int) -> list[Bundle]:
    return [bundle(i, 0, size) for i, size in enumerate(sizes)]


def plan(
    queue: list[Bundle], batch_size: int, least: dict[Kind, int] | None = None
) -> list[int] | None:
    planned = plan_batch(queue, Demand(batch_size, least or {}))
    return None if planned is None else [bundle.id for bundle in planned]


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
        pytest.param([8, 12, 12, 12, 8], 40, [0, 1, 2, 4], id="sizes that do not divide the batch"),
        pytest.param(
            [1, 1, 4, 1, 1], 4, [0, 1, 3, 4], id="packs of the largest size, oldest first"
        ),
        pytest.param([6, 4, 4, 6], 20, [0, 1, 2, 3], id="packs would never come out even"),
    ],
)
def test_plan(sizes: list[int], batch_size: int, planned: list[int] | None) -> None:
    assert plan(queue_of(*sizes), batch_size) == planned


def test_parts_of_one_group_are_taken_together_or_not_at_all() -> None:
    queue = [bundle(0, 0, 3, 1), bundle(1, 0, 2, 2), bundle(2, None, 1), bundle(3, None, 3)]
    assert plan(queue, 8) == [0, 1]
    assert plan(queue[1:], 4) == [1]
    assert plan([queue[0], queue[3]], 6) is None  # 3 + 3 of different groups


@pytest.mark.parametrize(
    ("senders", "least", "planned"),
    [
        pytest.param("AAAAB", {"A": 1}, [0, 1, 2, 3], id="the head holds the minimum"),
        pytest.param("AAAAB", {"B": 1}, [0, 1, 2, 4], id="the last place goes to the minimum"),
        pytest.param("AAAABBB", {"B": 3}, [0, 4, 5, 6], id="most places go to the minimum"),
        pytest.param("AAAAA", {"B": 1}, None, id="no data of an environment with a minimum"),
        pytest.param("AAABBB", {"A": 2, "B": 3}, None, id="minimums beyond the batch"),
        pytest.param(
            "---A-B", {"A": 1, "B": 1}, [0, 1, 3, 5], id="data without env_id is the rest"
        ),
        pytest.param("----A", {"A": 0}, [0, 1, 2, 3], id="a minimum of nothing"),
    ],
)
def test_minimums(senders: str, least: dict[str, int], planned: list[int] | None) -> None:
    env_ids = {"A": 0, "B": 1, "-": None}
    queue = [bundle(i, env_ids[sender], 2) for i, sender in enumerate(senders)]
    asked = {Kind(env_ids[sender], 2): n for sender, n in least.items()}
    assert plan(queue, 8, asked) == planned


def oldest_valid(queue: list[Bundle], demand: Demand) -> list[int] | None:
    """The same by trying every subset."""
    valid = []
    for count in range(1, len(queue) + 1):
        for subset in combinations(queue, count):
            held = Counter(bundle.kind for bundle in subset)
            is_exact = sum(bundle.sequences for bundle in subset) == demand.batch_size
            if is_exact and all(held[kind] >= n for kind, n in demand.least.items()):
                valid.append([bundle.id for bundle in subset])
    return min(valid, default=None)


def test_plan_is_the_oldest_of_all_valid_batches() -> None:
    for seed in range(300):
        queue, demand = small_case(seed)
        planned = plan(queue, demand.batch_size, dict(demand.least))
        assert planned == oldest_valid(queue, demand), f"seed {seed}"


def small_case(seed: int) -> tuple[list[Bundle], Demand]:
    dice = random.Random(seed)
    size_of = {0: dice.choice([2, 3, 4]), 1: dice.choice([1, 2, 6]), None: 0}
    senders = [dice.choice([0, 0, 1, None]) for _ in range(9)]
    queue = [
        bundle(i, env_id, size_of[env_id] or dice.choice([1, 2, 5]))
        for i, env_id in enumerate(senders)
    ]
    least = {Kind(e, size_of[e]): dice.randint(0, 2) for e in (0, 1) if dice.random() < 0.7}
    return queue, Demand(dice.randint(2, 14), {kind: n for kind, n in least.items() if n})


@pytest.mark.parametrize("seed", range(20))
def test_what_lies_behind_a_batch_of_each_kind_does_not_matter(seed: int) -> None:
    """What the store relies on when it reads no further than that."""
    dice = random.Random(seed)
    queue = [bundle(i, dice.choice([0, 1, None]), dice.choice([2, 3, 4, 8])) for i in range(60)]
    batch_size = dice.choice([8, 12, 17, 24])
    least = {Kind(1, 2): 2} if seed % 2 else {}
    seen: Counter[Kind] = Counter()
    head = []
    for candidate in queue:
        seen[candidate.kind] += 1
        if seen[candidate.kind] <= batch_size // candidate.sequences:
            head.append(candidate)
    assert len(head) < len(queue)
    assert plan(head, batch_size, least) == plan(queue, batch_size, least)


def test_a_deep_queue_with_many_minimums_is_planned_quickly() -> None:
    """20 environments, each with as much as fills a batch, and one that has to have more."""
    queue = [bundle(i, i % 20, 8) for i in range(20 * 128)]
    least = {Kind(env_id, 8): 6 for env_id in range(20)} | {Kind(3, 8): 14}
    planned = plan(queue, 1024, least)
    assert planned is not None
    assert Counter(i % 20 for i in planned) == {e: 14 if e == 3 else 6 for e in range(20)}
    assert max(planned) == 3 + 13 * 20
