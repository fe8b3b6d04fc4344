"""Chooses the queued groups that form the next batch, from metadata alone.

A batch holds exactly `batch_size` sequences and meets every minimum of `Demand`. Of all such
choices, the one with the oldest groups is taken.

The archived server builds batches from packs: groups of equal size that together have as many
sequences as the largest queued group. Every pack is also an exact sum, so this module finds a batch
whenever the archived server does. It also finds batches that packs cannot make, such as
6 + 4 + 4 + 6 sequences for 20.

The exact sums are found by dynamic programming on the bits of one integer: bit s is set if the
groups seen so far can add up to s. Adding up to n groups of one size takes log2(n) shifts.
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


def plan_batch(queue: Sequence[Kind], demand: Demand) -> list[int] | None:
    """Choose the next batch; None if the queue cannot meet the demand yet.

    Only the oldest `batch_size // sequences` groups of each kind can be chosen, so a caller may
    leave out the others. The cost then does not grow with the depth of the queue.

    Args:
        queue: the kind of each queued group, oldest first.
    Returns:
        Positions in `queue`, ascending.
    """
    # Without a minimum for its environment, only the size of a group matters.
    kinds = [kind if kind in demand.least else Kind(None, kind.sequences) for kind in queue]
    return oldest_choice(kinds, demand.batch_size, demand.least)


@dataclass(frozen=True)
class Demand:
    """The needs of a batch: `batch_size` sequences, and at least `least` groups of some kinds."""

    batch_size: int
    least: Mapping[Kind, int]

    def is_met_by(self, available: Mapping[Kind, int]) -> bool:
        """Whether a batch can be formed from these numbers of groups of each kind."""
        return can_make(self.batch_size, _stocks(available, self.least).values())

    def unmet(self, available: Mapping[Kind, int]) -> set[Kind]:
        """The kinds whose minimum `available` does not reach."""
        return {kind for kind, least in self.least.items() if available.get(kind, 0) < least}


def demand(
    batch_size: int, minimums: Mapping[Kind, float], available: Mapping[Kind, int]
) -> Demand:
    """The minimums that one batch can meet together.

    Each minimum is `int(batch_size * minimum)` sequences, rounded up to whole groups. Some minimums
    fit no batch: fractions that sum to more than 1, or group sizes that do not add up. One common
    factor then scales all of them down, as little as needed.

    If not even one group of each environment fits, no minimum applies: the run would wait forever.
    An environment whose group size does not divide the batch size has no minimum, since its groups
    are rejected. Only whole groups of the registered size count towards a minimum.

    Args:
        minimums: fraction of a batch that each connected environment reserves; each may still send
            any number of groups.
        available: groups in the queue, by kind.
    """
    minimums = {
        kind: minimum
        for kind, minimum in minimums.items()
        if not why_unservable(kind.sequences, batch_size)
    }
    rest = [Stock(kind.sequences, 0, n) for kind, n in available.items() if kind not in minimums]

    def scaled(step: int) -> dict[Kind, int]:
        """Minimums in groups, scaled by `step / batch_size`."""
        return {
            kind: minimum_groups(kind, minimum, batch_size, step)
            for kind, minimum in minimums.items()
        }

    def is_too_much(step: int) -> bool:
        stocks = [
            Stock(kind.sequences, least, batch_size // kind.sequences)
            for kind, least in scaled(step).items()
        ]
        return not can_make(batch_size, stocks + rest)

    step = batch_size
    if is_too_much(step):
        step = max(0, bisect_left(range(batch_size), True, key=is_too_much) - 1)
    return Demand(batch_size, {kind: groups for kind, groups in scaled(step).items() if groups})


def minimum_groups(kind: Kind, minimum: float, batch_size: int, step: int | None = None) -> int:
    """A minimum in groups, rounded up; scaled by `step / batch_size` if `step` is given."""
    declared = int(batch_size * minimum)
    sequences = declared if step is None else -(-declared * step // batch_size)
    return -(-sequences // kind.sequences)


def why_unservable(sequences: int, batch_size: int) -> str | None:
    """Why no batch can be made of groups of this size; None if one can.

    Groups are never split, so the size must divide the batch size. A size that needs other sizes
    to fill the batch would block the queue when the sender of those leaves.
    """
    if batch_size % sequences == 0:
        return None
    return (
        f"groups of {sequences} sequences do not fill a batch of exactly {batch_size}; use a group "
        f"size that divides {batch_size}, or register the trainer with another batch_size"
    )


def batch_size_conflicts(
    batch_size: int, group_size_of: Mapping[int, int], queued: Mapping[Kind, int]
) -> list[str]:
    """Why a batch size does not fit the queued groups and connected environments of a run.

    Args:
        group_size_of: env_id → group size of each connected environment.
        queued: groups in the queue, by kind.
    """
    lying = [
        f"groups of {size} sequences are queued"
        for size in sorted({kind.sequences for kind in queued})
        if why_unservable(size, batch_size)
    ]
    coming = [
        f"environment {env_id} sends groups of {size} sequences"
        for env_id, size in sorted(group_size_of.items())
        if why_unservable(size, batch_size)
    ]
    return lying + coming


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
    stocks = _stocks(Counter(queue), least or {})
    if not can_make(total, stocks.values()):
        return None
    chosen: list[int] = []
    candidates = list(range(len(queue)))
    while candidates and total:
        run = _longest_run(queue, candidates, stocks, total)
        taken = Counter(queue[i] for i in candidates[:run])
        chosen += candidates[:run]
        for kind, n in taken.items():
            stock = stocks[kind]
            stocks[kind] = replace(stock, least=max(0, stock.least - n), most=stock.most - n)
            total -= kind.sequences * n
        if run == len(candidates):
            break
        # No exact choice contains this group, so none contains a younger one of its kind.
        refused = queue[candidates[run]]
        stocks[refused] = replace(stocks[refused], most=0)
        candidates = [i for i in candidates[run + 1 :] if queue[i] != refused]
    return chosen


def _stocks(available: Mapping[Kind, int], least: Mapping[Kind, int]) -> dict[Kind, Stock]:
    return {
        kind: Stock(kind.sequences, least.get(kind, 0), available.get(kind, 0))
        for kind in {**available, **least}
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
