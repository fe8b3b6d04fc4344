"""What a batch has to hold: an exact number of sequences, and every environment's minimum. Pure.

A minimum counts in whole groups of the size that its environment registered; what the environment
sent in other sizes counts towards the rest, as data without an env_id does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo_api.planning.subset_sum import Kind, Stock, can_make


def why_unservable(sequences: int, batch_size: int) -> str | None:
    """Why no batch can be made of groups of this size; None where one can.

    Groups are never split, so a size has to divide the batch. One that needs groups of other sizes
    beside it would hold the queue up whenever their sender leaves.
    """
    if batch_size % sequences == 0:
        return None
    return (
        f"groups of {sequences} sequences cannot be served: batches hold exactly {batch_size}, "
        f"which they do not fill; use a group size that divides {batch_size}, or register the "
        "trainer with another batch_size"
    )


def batch_size_conflicts(
    batch_size: int, group_size_of: Mapping[int, int], queued: Mapping[Kind, int]
) -> list[str]:
    """Why a batch size does not suit what a run holds: queued groups, connected environments.

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
        f"environment {env_id} sends groups of {size}"
        for env_id, size in sorted(group_size_of.items())
        if why_unservable(size, batch_size)
    ]
    return lying + coming


@dataclass(frozen=True)
class Share:
    """A connected environment's claim: at least the fraction `minimum` of every batch."""

    env_id: int
    group_size: int
    minimum: float

    @property
    def kind(self) -> Kind:
        return Kind(self.env_id, self.group_size)

    def groups(self, batch_size: int, step: int | None = None) -> int:
        """Groups that the minimum takes, scaled by `step / batch_size` where given, rounded up."""
        declared = int(batch_size * self.minimum)
        scaled = declared if step is None else -(-declared * step // batch_size)
        return -(-scaled // self.group_size)


@dataclass(frozen=True)
class Demand:
    """A batch of exactly `batch_size` sequences with at least `least` groups of some kinds."""

    batch_size: int
    least: Mapping[Kind, int]

    def is_met_by(self, available: Mapping[Kind, int]) -> bool:
        """Whether a batch can be formed from so many groups of each kind."""
        return can_make(
            self.batch_size,
            [
                Stock(kind.sequences, self.least.get(kind, 0), available.get(kind, 0))
                for kind in {**available, **self.least}
            ],
        )

    def unmet(self, available: Mapping[Kind, int]) -> set[Kind]:
        """Kinds with a minimum that `available` does not hold."""
        return {kind for kind, least in self.least.items() if available.get(kind, 0) < least}


def demand(batch_size: int, shares: Sequence[Share], available: Mapping[Kind, int]) -> Demand:
    """The minimums that a batch can honour, as `Demand`.

    Each is `int(batch_size * minimum)` sequences, in whole groups. Minimums that no batch could
    hold together, however long one waited for data, are scaled down by one common factor, as little
    as makes them fit: sums above one, and group sizes that do not add up beside each other.
    Where not even one group of each fits, none is enforced: a run must not wait for what cannot be.
    An environment whose group size does not divide the batch has no claim: its data is refused.

    Args:
        shares: of connected environments, each of which could still send any number of groups.
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
