"""Computes the number of sequences of a batch and each environment's minimum in it.

A minimum is counted in whole groups of the environment's registered size. Groups of other sizes do
not count towards the minimum, and neither do groups without an env_id.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo_api.planning.subset_sum import Kind, Stock, can_make


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
class Share:
    """A connected environment's minimum: its reserved fraction of every batch."""

    env_id: int
    group_size: int
    minimum: float

    @property
    def kind(self) -> Kind:
        return Kind(self.env_id, self.group_size)

    def groups(self, batch_size: int, step: int | None = None) -> int:
        """The minimum in groups, rounded up; scaled by `step / batch_size` if `step` is given."""
        declared = int(batch_size * self.minimum)
        scaled = declared if step is None else -(-declared * step // batch_size)
        return -(-scaled // self.group_size)


@dataclass(frozen=True)
class Demand:
    """The needs of a batch: `batch_size` sequences, and at least `least` groups of some kinds."""

    batch_size: int
    least: Mapping[Kind, int]

    def is_met_by(self, available: Mapping[Kind, int]) -> bool:
        """Whether a batch can be formed from these numbers of groups of each kind."""
        return can_make(
            self.batch_size,
            [
                Stock(kind.sequences, self.least.get(kind, 0), available.get(kind, 0))
                for kind in {**available, **self.least}
            ],
        )

    def unmet(self, available: Mapping[Kind, int]) -> set[Kind]:
        """The kinds whose minimum `available` does not reach."""
        return {kind for kind, least in self.least.items() if available.get(kind, 0) < least}


def demand(batch_size: int, shares: Sequence[Share], available: Mapping[Kind, int]) -> Demand:
    """The minimums that one batch can meet together.

    Each minimum is `int(batch_size * minimum)` sequences, rounded up to whole groups. Some minimums
    fit no batch: fractions that sum to more than 1, or group sizes that do not add up. One common
    factor then scales all of them down, as little as needed.

    If not even one group of each environment fits, no minimum applies: the run would wait forever.
    An environment whose group size does not divide the batch size has no minimum, since its groups
    are rejected.

    Args:
        shares: of connected environments; each may still send any number of groups.
        available: groups in the queue, by kind.
    """
    shares = [share for share in shares if not why_unservable(share.group_size, batch_size)]
    own = {share.kind for share in shares}
    rest = [Stock(kind.sequences, 0, n) for kind, n in available.items() if kind not in own]

    def is_too_much(step: int) -> bool:
        stocks = [
            Stock(s.group_size, s.groups(batch_size, step), batch_size // s.group_size)
            for s in shares
        ]
        return not can_make(batch_size, stocks + rest)

    step = batch_size
    if is_too_much(step):
        step = max(0, bisect_left(range(batch_size), True, key=is_too_much) - 1)
    least = {share.kind: share.groups(batch_size, step) for share in shares}
    return Demand(batch_size, {kind: groups for kind, groups in least.items() if groups})
