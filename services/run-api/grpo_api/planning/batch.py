"""Chooses the queued groups that form the next batch, from metadata alone.

A batch holds exactly `batch_size` sequences and meets every minimum of `Demand`. Of all such
choices, the one with the oldest groups is taken.

The archived server builds batches from packs: groups of equal size that together have as many
sequences as the largest queued group. Every pack is also an exact sum, so this module finds a batch
whenever the archived server does. It also finds batches that packs cannot make, such as
6 + 4 + 4 + 6 sequences for 20."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_api.planning.quotas import Demand
from grpo_api.planning.subset_sum import Kind, oldest_choice
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
