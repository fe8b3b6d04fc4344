"""Solves subset sum: chooses the oldest groups whose sizes add up to an exact total.

The algorithm is dynamic programming on the bits of one integer: bit s is set if the groups seen so
far can add up to s. Adding up to n groups of one size takes log2(n) shifts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


class Kind(NamedTuple):
    """Groups of one kind are interchangeable. `env_id` is None if the sender does not matter."""

    env_id: int | None
    sequences: int


@dataclass(frozen=True)
class Stock:
    """Interchangeable groups, of which between `least` and `most` are chosen."""

    sequences: int
    least: int
    most: int


def can_make(total: int, stocks: Iterable[Stock]) -> bool:
    """Whether groups from `stocks`, within their limits, can add up to `total` sequences."""
    within = (1 << (total + 1)) - 1
    sums = 1
    for stock in stocks:
        if stock.least > stock.most or stock.least * stock.sequences > total:
            return False
        sums = sums << (stock.least * stock.sequences) & within
        spare = min(stock.most, total // stock.sequences) - stock.least
        covered = 1  # `sums` already allows for 0 to covered - 1 more groups
        while spare > 0:
            step = min(covered, spare)
            sums = (sums | sums << (step * stock.sequences)) & within
            spare -= step
            covered += step
    return bool(sums >> total & 1)


def oldest_choice(
    queue: Sequence[Kind], total: int, least: Mapping[Kind, int] | None = None
) -> list[int] | None:
    """Choose the oldest groups that hold exactly `total` sequences together.

    Each group, oldest first, is taken if younger groups can fill the rest. The result is the first
    of all exact choices in order of age. A group that fits no choice does not delay the others.

    Args:
        queue: the kind of each group, oldest first.
        least: minimum number of chosen groups, for some kinds.
    Returns:
        Positions in `queue`, ascending, or None if no exact choice exists.
    """
    stocks = _stocks(queue, least or {})
    if not can_make(total, stocks.values()):
        return None
    chosen: list[int] = []
    candidates = list(range(len(queue)))
    while candidates and total:
        run = _longest_run(queue, candidates, stocks, total)
        taken = Counter(queue[i] for i in candidates[:run])
        chosen += candidates[:run]
        stocks |= {kind: _with_taken(stocks[kind], n) for kind, n in taken.items()}
        total -= sum(kind.sequences * n for kind, n in taken.items())
        if run == len(candidates):
            break
        # No exact choice contains this group, so none contains a younger one of its kind.
        refused = queue[candidates[run]]
        stocks[refused] = replace(stocks[refused], most=0)
        candidates = [i for i in candidates[run + 1 :] if queue[i] != refused]
    return chosen


def _stocks(queue: Sequence[Kind], least: Mapping[Kind, int]) -> dict[Kind, Stock]:
    available = Counter(queue)
    return {
        kind: Stock(kind.sequences, least.get(kind, 0), available[kind])
        for kind in [*available, *(kind for kind in least if kind not in available)]
    }


def _longest_run(
    queue: Sequence[Kind], candidates: Sequence[int], stocks: Mapping[Kind, Stock], total: int
) -> int:
    """The largest number of oldest candidates that one exact choice can contain together."""

    def cannot_take(count: int) -> bool:
        taken = Counter(queue[i] for i in candidates[:count])
        forced = {
            kind: replace(stocks[kind], least=max(stocks[kind].least, n))
            for kind, n in taken.items()
        }
        return not can_make(total, {**stocks, **forced}.values())

    return bisect_left(range(1, len(candidates) + 1), True, key=cannot_take)


def _with_taken(stock: Stock, taken: int) -> Stock:
    return replace(stock, least=max(0, stock.least - taken), most=stock.most - taken)
