"""Division of a step's sequences into micro-batches."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainer.data.cuts import KEYS_PER_TOKEN, Cut, Division, by_length, by_prefix
from grpo_trainer.data.groups import common_prefix

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=20)
BUDGET = st.integers(1, 40)


def padded(part: list[list[int]]) -> int:
    return len(part) * max(map(len, part))


def computed(part: list[list[int]]) -> int:
    """Tokens of a micro-batch, each beginning that neighbours share counted once."""
    pairs = zip([[], *part], part, strict=False)
    return sum(len(row) - common_prefix(previous, row) for previous, row in pairs)


@pytest.mark.parametrize("cut", [by_length, by_prefix])
@given(SEQUENCES, BUDGET)
def test_each_sequence_is_in_one_micro_batch_within_the_budget(
    cut: Cut, sequences: list[list[int]], tokens: int
) -> None:
    micro_batches = cut(sequences, tokens)
    assert sorted(i for part in micro_batches for i in part) == list(range(len(sequences)))
    for indices in micro_batches:
        part = [sequences[i] for i in indices]
        if len(part) > 1:
            assert (padded if cut is by_length else computed)(part) <= tokens
            assert sum(map(len, part)) <= KEYS_PER_TOKEN * tokens


@given(SEQUENCES)
def test_without_a_limit_each_distinct_beginning_counts_once(sequences: list[list[int]]) -> None:
    (order,) = by_prefix(sequences, 10_000)
    distinct = {tuple(row[: n + 1]) for row in sequences for n in range(len(row))}
    assert computed([sequences[i] for i in order]) == len(distinct)


def test_groups_stay_whole_where_the_budget_allows() -> None:
    """Eight groups of four, 50 + 4 * 5 tokens each; 180 tokens hold two groups and a half."""
    sequences = [[g] * 50 + [g, i, 1, 2, 3] for g in range(8) for i in range(4)]
    random.Random(0).shuffle(sequences)
    micro_batches = by_prefix(sequences, 180)
    assert [len(part) for part in micro_batches] == [8, 8, 8, 8]


@pytest.mark.parametrize("cut", [by_length, by_prefix])
@given(SEQUENCES, BUDGET, st.integers(2, 4), st.sampled_from([0.0, 0.25]))
def test_several_ranks_get_the_most_even_micro_batches(
    cut: Division, sequences: list[list[int]], tokens: int, ranks: int, view: float
) -> None:
    """Each sequence once, within the budget, in the fewest rounds; and nothing that divides the
    same order as often has a less costly most costly micro-batch, up to a token."""
    line = cut.line_up(sequences, view)
    found = replace(cut, ranks=ranks, view=view)(sequences, tokens)
    assert sorted(i for part in found for i in part) == list(range(len(sequences)))
    places = {index: place for place, index in enumerate(line.order)}
    spans = [(places[part[0]], places[part[-1]] + 1) for part in found]
    assert all(line.tokens(*span) <= tokens for span in spans if span[1] - span[0] > 1)
    rounds = -(-len(found) // ranks)

    @cache
    def least(start: int, parts: int) -> float:
        """The highest cost of that many micro-batches of the sequences from `start` on."""
        if start == len(sequences):
            return 0.0
        if not parts:
            return inf
        ends = range(start + 1, len(sequences) + 1)
        fits = [e for e in ends if e == start + 1 or line.tokens(start, e) <= tokens]
        return min(max(line.cost(start, e), least(e, parts - 1)) for e in fits)

    assert least(0, (rounds - 1) * ranks) == inf
    assert max(line.cost(*span) for span in spans) <= least(0, rounds * ranks) + 1


def test_the_ranks_of_a_round_have_nearly_equal_micro_batches() -> None:
    sequences = [[i] * (30 + i) for i in range(40)]
    found = replace(by_length, ranks=4)(sequences, 50)
    costs = [padded([sequences[i] for i in part]) for part in found]
    assert costs == sorted(costs, reverse=True)
    assert len(costs) == 40
    assert all(max(costs[k : k + 4]) - min(costs[k : k + 4]) == 3 for k in range(0, 40, 4))
