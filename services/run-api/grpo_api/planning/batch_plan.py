"""Chooses the queued groups that form the next batch, from metadata alone.

A batch holds exactly `batch_size` sequences and meets every minimum of `Demand`. Of all such
choices, the one with the oldest groups is taken.

The archived server builds batches from packs: groups of equal size that together have as many
sequences as the largest queued group. Every pack is also an exact sum, so this module finds a batch
whenever the archived server does. It also finds batches that packs cannot make, such as
6 + 4 + 4 + 6 sequences for 20."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo_api.planning.subset_sum import Kind, Stock, can_make, oldest_choice
from grpo_core.wire.policy_version import PolicyVersion


@dataclass(frozen=True)
class StoredGroup:
    """Metadata of a group whose payload Redis stores under `id`. Later groups have higher ids.

    `received_under`: the policy version that was served when run-api received the group; None if
    it was unknown.
    """

    id: int
    sequences: int
    stored_bytes: int
    received_under: PolicyVersion | None = None


@dataclass(frozen=True)
class Bundle:
    """Groups that are queued and put into a batch together, in this order.

    A bundle is one whole group, or parts that add up to one. Parts planned one by one could get
    stuck: a part of 3 fits no batch once its part of 1 went into another.
    """

    id: int
    """The id of the group that completed the bundle. Later bundles have higher ids."""
    env_id: int | None
    groups: tuple[StoredGroup, ...]
    queued_ms: int = 0
    """When it was queued, by the clock of Redis; 0 until then."""

    @property
    def sequences(self) -> int:
        return sum(group.sequences for group in self.groups)

    @property
    def kind(self) -> Kind:
        return Kind(self.env_id, self.sequences)


def plan_batch(queue: Sequence[Bundle], demand: Demand) -> list[Bundle] | None:
    """Choose the next batch, oldest first; None if the queue cannot meet the demand yet.

    Only the oldest `batch_size // sequences` bundles of each kind can be chosen, so a caller may
    leave out the others. The cost then does not grow with the depth of the queue.

    Args:
        queue: oldest first.
    """
    if sum(bundle.sequences for bundle in queue) < demand.batch_size:
        return None
    head = _head(queue, demand.batch_size)
    if head is not None and not demand.unmet(Counter(bundle.kind for bundle in head)):
        return head
    chosen = oldest_choice(
        [_kind(bundle, demand) for bundle in queue], demand.batch_size, demand.least
    )
    return None if chosen is None else [queue[i] for i in chosen]


def _head(queue: Sequence[Bundle], batch_size: int) -> list[Bundle] | None:
    """The first bundles of the queue if they fill the batch exactly, which is the usual case."""
    chosen: list[Bundle] = []
    missing = batch_size
    for bundle in queue:
        if bundle.sequences > missing:
            return None
        chosen.append(bundle)
        missing -= bundle.sequences
        if missing == 0:
            return chosen
    return None


def _kind(bundle: Bundle, demand: Demand) -> Kind:
    """The kind; without `env_id` if the environment has no minimum, since only the size matters."""
    return bundle.kind if bundle.kind in demand.least else Kind(None, bundle.sequences)


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
