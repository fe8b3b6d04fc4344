"""Exact sums, held against every subset of small queues."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product

import pytest

from grpo_api.exact_sums import Kind, Stock, can_make, oldest_choice


def kinds(*sizes: int) -> list[Kind]:
    return [Kind(None, size) for size in sizes]


def exact_subsets(
    queue: Sequence[Kind], total: int, least: Mapping[Kind, int]
) -> Iterator[tuple[int, ...]]:
    for count in range(len(queue) + 1):
        for subset in combinations(range(len(queue)), count):
            held = Counter(queue[i] for i in subset)
            is_exact = sum(queue[i].sequences for i in subset) == total
            if is_exact and all(held[kind] >= n for kind, n in least.items()):
                yield subset


@pytest.mark.parametrize("stock", [Stock(3, 1, 4), Stock(5, 0, 0), Stock(2, 0, 7), Stock(1, 2, 2)])
def test_one_stock_makes_its_multiples_within_its_limits(stock: Stock) -> None:
    made = [total for total in range(40) if can_make(total, [stock])]
    assert made == [stock.sequences * n for n in range(stock.least, stock.most + 1)]


def test_more_asked_for_than_there_is_makes_nothing() -> None:
    assert not any(can_make(total, [Stock(2, 3, 2)]) for total in range(20))


@pytest.mark.parametrize("total", range(25))
def test_stocks_add_up_as_their_numbers_do(total: int) -> None:
    stocks = [Stock(4, 1, 3), Stock(6, 0, 2), Stock(5, 0, 1)]
    numbers = product(*(range(stock.least, stock.most + 1) for stock in stocks))
    sums = {sum(n * s.sequences for n, s in zip(ns, stocks, strict=True)) for ns in numbers}
    assert can_make(total, stocks) == (total in sums)


def test_choice_is_the_first_exact_one_in_order_of_age() -> None:
    for seed in range(200):
        dice = random.Random(seed)
        queue = [Kind(dice.choice([None, 0, 1]), dice.choice([1, 2, 3, 4, 6])) for _ in range(9)]
        least = {Kind(0, dice.choice([1, 2, 3])): dice.choice([1, 2])} if seed % 2 else {}
        total = dice.randint(1, 16)
        exact = list(exact_subsets(queue, total, least))
        expected = list(min(exact)) if exact else None
        assert oldest_choice(queue, total, least) == expected, f"seed {seed}"


def test_a_kind_that_is_asked_for_and_missing_leaves_no_choice() -> None:
    assert oldest_choice(kinds(2, 2), 4, {Kind(7, 2): 1}) is None


def test_long_queue_of_mixed_sizes_is_chosen_from_quickly() -> None:
    chosen = oldest_choice(kinds(*[4] * 3, *[6] * 20_000), 38)
    assert chosen == [0, 1, 3, 4, 5, 6, 7]  # 2 * 4 + 5 * 6
