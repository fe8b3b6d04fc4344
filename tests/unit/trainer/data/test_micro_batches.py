"""Division of a step's sequences into micro-batches."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainer.data.collate import KEYS_PER_TOKEN, Cut, by_length, by_prefix
from grpo_trainer.data.groups import common_prefix

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=20)
BUDGET = st.integers(1, 40)


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
            padded = len(part) * max(map(len, part))
            assert (padded if cut is by_length else computed(part)) <= tokens
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
