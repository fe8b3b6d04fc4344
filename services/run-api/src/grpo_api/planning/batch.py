"""Which queued groups make the next batch: a pure decision on metadata, no payload is read.

A batch holds exactly `batch_size` sequences, every minimum of `Demand`, and of all such choices the
oldest. The archived server forms batches from packs: equal groups that add up to the largest size
in the queue. A pack is an exact sum, so a batch is found here wherever one is found there, and also
where packs never come out even (parts of 3 + 1, or 6 + 4 + 4 + 6 sequences in a batch of 20)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_api.planning.quotas import Demand
from grpo_api.planning.subset_sum import Kind, oldest_choice
from grpo_core.wire.policy_version import PolicyVersion


@dataclass(frozen=True)
class StoredGroup:
    """A group whose payload lies in Redis under `id`. Ids grow with the order of arrival.

    `received_under`: the version that was served when it was received, None where nobody had said.
    """

    id: int
    sequences: int
    stored_bytes: int
    received_under: PolicyVersion | None = None


@dataclass(frozen=True)
class Bundle:
    """Groups that are queued and served together, in this order.

    Parts that an environment sent in place of one group stay together in the queue. Planned one by
    one they could be stranded: a part of 3 whose part of 1 went into another batch fits none.
    """

    id: int
    """Grows with the order of queueing: the id of the group that completed the bundle."""
    env_id: int | None
    groups: tuple[StoredGroup, ...]
    queued_ms: int = 0
    """Redis' time of queueing; 0 before."""

    @property
    def sequences(self) -> int:
        return sum(group.sequences for group in self.groups)

    @property
    def kind(self) -> Kind:
        return Kind(self.env_id, self.sequences)


def plan_batch(queue: Sequence[Bundle], demand: Demand) -> list[Bundle] | None:
    """Choose the next batch, oldest first; None where the queue cannot meet the demand yet.

    Of each kind only the oldest `batch_size // sequences` bundles can matter, so a caller may leave
    out what lies behind those: the cost depends on the batch and the number of kinds, not on the
    depth of the queue.

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
    """The head of the queue where it fills the batch exactly: the usual case, at O(batch)."""
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
    """Bundles of environments without a minimum are interchangeable: only their size matters."""
    return bundle.kind if bundle.kind in demand.least else Kind(None, bundle.sequences)
