"""What a batch takes whole: one scored group, or the parts that make up one. Metadata only."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_api.planning.subset_sum import Kind
from grpo_core.wire import PolicyVersion


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
