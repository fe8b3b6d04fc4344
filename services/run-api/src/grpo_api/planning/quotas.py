"""What a batch has to hold: an exact number of sequences, and every environment's minimum. Pure.

A minimum counts in whole groups of the size that its environment registered; what the environment
sent in other sizes counts towards the rest, as data without an env_id does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from grpo_api.planning.subset_sum import Kind, Stock, can_make

Partners = Mapping[int, int]
"""How many groups of each size a batch could get besides."""


def partners(batch_size: int, senders: Iterable[int], queued: Mapping[Kind, int]) -> Partners:
    """Any number from those who are connected; of what only lies in the queue, what lies there.

    Args:
        senders: group size of each connected environment.
        queued: groups in the queue, by kind.
    """
    available: dict[int, int] = {}
    for kind, groups in queued.items():
        available[kind.sequences] = available.get(kind.sequences, 0) + groups
    return available | {size: batch_size // size for size in senders}


def can_be_served(sequences: int, batch_size: int, others: Partners | None = None) -> bool:
    """Whether a batch can hold a group of `sequences`. Its sender may send any number of them."""
    rest = [Stock(size, 0, most) for size, most in (others or {}).items() if size != sequences]
    return can_make(batch_size, [Stock(sequences, 1, batch_size // sequences), *rest])


def why_unservable(sequences: int, batch_size: int, others: Partners | None = None) -> str:
    """What to tell the sender of a size that fails `can_be_served`."""
    if sequences > batch_size:
        return (
            f"a group of {sequences} sequences can never be served: batches hold exactly "
            f"{batch_size}; send smaller groups or register the trainer with a larger batch_size"
        )
    sizes = sorted(size for size in others or {} if size != sequences)
    besides = f", nor with groups of {', '.join(map(str, sizes))} beside it" if sizes else ""
    return (
        f"a group of {sequences} sequences cannot be served: batches hold exactly {batch_size}, "
        f"which groups of {sequences} do not fill{besides}; use a group size that divides "
        f"{batch_size}, or connect an environment whose groups fill the rest"
    )


def batch_size_conflicts(
    batch_size: int, group_size_of: Mapping[int, int], queued: Mapping[Kind, int]
) -> list[str]:
    """Why a batch size does not suit what a run holds: queued groups, connected environments.

    Args:
        group_size_of: env_id → group size of each connected environment.
        queued: groups in the queue, by kind.
    """
    others = partners(batch_size, group_size_of.values(), queued)
    unservable = {size for size in others if not can_be_served(size, batch_size, others)}
    lying = [
        f"groups of {size} sequences are queued"
        for size in sorted({kind.sequences for kind in queued} & unservable)
    ]
    coming = [
        f"environment {env_id} sends groups of {size}"
        for env_id, size in sorted(group_size_of.items())
        if size in unservable
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
    An environment whose group size cannot be served now has no claim: its data is refused.

    Args:
        shares: of connected environments, each of which could still send any number of groups.
        available: groups in the queue, by kind.
    """
    others = partners(batch_size, [share.group_size for share in shares], available)
    shares = [share for share in shares if can_be_served(share.group_size, batch_size, others)]
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
