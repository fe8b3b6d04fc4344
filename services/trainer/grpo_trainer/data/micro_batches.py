"""Divides the sequences of a step into micro-batches of a bounded number of tokens.

Pure functions of token lists. A cut changes no result but for rounding; it decides how many tokens
one forward pass computes and how much memory it needs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise

KEYS_PER_TOKEN = 8
"""Limit of the sequences' own lengths in a micro-batch of packed sequences, per computed token:
attention gathers the keys of a shared beginning once for each sequence."""

Tokens = list[int]
Cut = Callable[[Sequence[Tokens], int], list[list[int]]]
"""Args: the sequences' tokens, and the budget of a micro-batch in tokens. Returns the indices of
the sequences of each micro-batch, in the order in which they are laid out. A micro-batch has at
least one sequence, whatever its length."""


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Length of the common beginning."""
    lengths = range(1, min(len(a), len(b)) + 1)
    return bisect_left(lengths, True, key=lambda length: a[:length] != b[:length])


def by_length(sequences: Sequence[Tokens], tokens: int) -> list[list[int]]:
    """For padded rows: sequences of nearly the same length together. Padding counts as tokens."""
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]), reverse=True)
    micro_batches: list[list[int]] = []
    room = 0
    for index in order:
        if not room:
            micro_batches.append([])
            room = max(1, tokens // max(1, len(sequences[index])))
        micro_batches[-1].append(index)
        room -= 1
    return micro_batches


def by_prefix(sequences: Sequence[Tokens], tokens: int) -> list[list[int]]:
    """For packed sequences: sequences with a common beginning next to each other. The beginning
    that a sequence shares with the previous one of its micro-batch counts no tokens.

    A micro-batch ends, if possible, where two neighbours share least.
    """
    order = sorted(range(len(sequences)), key=lambda i: sequences[i])
    rows = [sequences[i] for i in order]
    shared = [0, *(common_prefix(a, b) for a, b in pairwise(rows))]
    micro_batches: list[list[int]] = []
    start = 0
    while start < len(rows):
        end = _end(rows, shared, start, tokens)
        micro_batches.append(order[start:end])
        start = end
    return micro_batches


def _end(rows: Sequence[Tokens], shared: Sequence[int], start: int, tokens: int) -> int:
    """Where the micro-batch that begins at `start` ends: the best place in the second half of the
    rows for which there is room."""
    computed = keys = 0
    for i in range(start, len(rows)):
        computed += len(rows[i]) - (shared[i] if i > start else 0)
        keys += len(rows[i])
        if i > start and (computed > tokens or keys > KEYS_PER_TOKEN * tokens):
            places = range(i, start + (i - start) // 2, -1)
            return min(places, key=shared.__getitem__)
    return len(rows)
