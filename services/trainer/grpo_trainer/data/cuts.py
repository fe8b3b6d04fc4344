"""Divides the sequences of a step into micro-batches of a bounded number of tokens each.

One rank computes as few as possible, which end where neighbours share least. Several ranks compute
one each at a time, and wait for the slowest: they get micro-batches of nearly equal cost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from math import ceil, inf
from operator import sub

from grpo_trainer.data.groups import Tokens, common_prefix

KEYS_PER_TOKEN = 8
"""Limit of the sequences' own lengths in a micro-batch of packed sequences, per computed token:
attention gathers the keys of a shared beginning once for each sequence."""

Cut = Callable[[Sequence[Tokens], int], list[list[int]]]
"""Args: the sequences' tokens, and the budget of a micro-batch in tokens. Returns the indices of
the sequences of each micro-batch, in the order in which they are laid out. A micro-batch has at
least one sequence, whatever its length."""

Size = Callable[[int, int], float]
"""Of the sequences from a start up to an end; without the first one it is not larger."""


@dataclass(frozen=True)
class Lineup:
    """Sequences in the order in which a layout divides them.

    Args:
        order: their indices
        shared: number of tokens that each has in common with the previous one
        tokens: of a micro-batch, as the budget counts them
        cost: of computing a micro-batch, in tokens without attention
    """

    order: Sequence[int]
    shared: Sequence[int]
    tokens: Size
    cost: Size

    def parts(self, tokens: int, most: float | None = None) -> list[tuple[int, int]]:
        """Start and end of each micro-batch. Args: most: their highest cost. None: any; then each
        ends at the best place in the second half of the sequences for which there is room"""
        parts, start, count = [], 0, len(self.order)
        while start < count:
            is_over = partial(self._is_over, start, tokens, inf if most is None else most)
            end = start + 1 + bisect_left(range(start + 2, count + 1), True, key=is_over)
            if most is None and end < count:
                places = range(end, start + (end - start) // 2, -1)
                end = min(places, key=self.shared.__getitem__)
            parts.append((start, end))
            start = end
        return parts

    def _is_over(self, start: int, tokens: int, most: float, end: int) -> bool:
        return self.tokens(start, end) > tokens or self.cost(start, end) > most

    def even(self, tokens: int, ranks: int) -> list[tuple[int, int]]:
        """With the least highest cost in the fewest rounds. The costliest come first."""
        rounds = ceil(len(self.parts(tokens, inf)) / ranks)
        costs = range(ceil(self.cost(0, len(self.order))))
        most = bisect_left(
            costs, True, key=lambda most: len(self.parts(tokens, most)) <= rounds * ranks
        )
        return sorted(self.parts(tokens, most), key=lambda part: -self.cost(*part))


@dataclass(frozen=True)
class Division:
    """A `Cut`.

    Args:
        line_up: of the sequences' tokens and `view`
        ranks: that compute a step: micro-batch i is for rank i modulo `ranks`
        view: cost of attention to one token, in that of a token without attention
    """

    line_up: Callable[[Sequence[Tokens], float], Lineup]
    ranks: int = 1
    view: float = 0.0

    def __call__(self, sequences: Sequence[Tokens], tokens: int) -> list[list[int]]:
        line = self.line_up(sequences, self.view)
        parts = line.parts(tokens) if self.ranks == 1 else line.even(tokens, self.ranks)
        return [[*line.order[start:end]] for start, end in parts]


def _cost(length: int, view: float) -> float:
    return length + view * length * (length + 1) / 2


def in_length_order(sequences: Sequence[Tokens], view: float) -> Lineup:
    """For padded rows: sequences of nearly the same length together. Padding counts as tokens."""
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]), reverse=True)
    lengths = [max(1, len(sequences[i])) for i in order]
    return Lineup(
        order,
        [0] * len(order),
        tokens=lambda start, end: (end - start) * lengths[start],
        cost=lambda start, end: (end - start) * _cost(lengths[start], view),
    )


def in_prefix_order(sequences: Sequence[Tokens], view: float) -> Lineup:
    """For packed sequences: sequences with a common beginning next to each other. The beginning
    that a sequence shares with the previous one of its micro-batch counts no tokens."""
    order = sorted(range(len(sequences)), key=lambda i: sequences[i])
    rows = [sequences[i] for i in order]
    lengths, shared = [*map(len, rows)], [0, *(common_prefix(a, b) for a, b in pairwise(rows))]
    keys, computed = _size(lengths, [0] * len(rows)), _size(lengths, shared)
    return Lineup(
        order,
        shared,
        tokens=lambda start, end: max(computed(start, end), keys(start, end) / KEYS_PER_TOKEN),
        cost=_size([_cost(n, view) for n in lengths], [_cost(n, view) for n in shared]),
    )


def _size(whole: Sequence[float], again: Sequence[float]) -> Size:
    """Args: whole: of each sequence; again: of what it shares with the previous one, which the
    first one of a micro-batch needs too"""
    total = [0.0, *accumulate(map(sub, whole, again))]
    return lambda start, end: total[end] - total[start] + again[start]


by_length, by_prefix = Division(in_length_order), Division(in_prefix_order)
