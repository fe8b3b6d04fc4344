"""Which queued groups make the next batch: a pure decision on metadata, no payload is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class QueuedGroup:
    """One group waiting in the queue. `id` grows with the order of submission."""

    id: int
    env_id: int | None
    sequences: int
    stored_bytes: int


def plan_batch(queue: Sequence[QueuedGroup], batch_size: int) -> list[int] | None:
    """Choose groups that hold exactly `batch_size` sequences, the oldest that can.

    Each group, oldest first, is taken if the groups behind it can fill what it leaves. With equal
    sizes that is the head of the queue. With sizes that differ, a group that fits no batch yet
    waits without holding up the others: wherever an exact batch exists, one is found.

    Args:
        queue: oldest first.
    Returns:
        Group ids, oldest first, or None where no subset fills a batch.

    The sums that each tail of the queue can reach are the bits of one integer (subset-sum by
    dynamic programming), so a queue of n groups costs n shifts of `batch_size` bits.
    """
    if sum(group.sequences for group in queue) < batch_size:
        return None
    head = _equal_sized_head(queue, batch_size)
    return head if head is not None else _oldest_exact_subset(queue, batch_size)


def _equal_sized_head(queue: Sequence[QueuedGroup], batch_size: int) -> list[int] | None:
    """The head of the queue where it fills the batch exactly: the usual case, at O(batch)."""
    chosen: list[int] = []
    missing = batch_size
    for group in queue:
        if group.sequences > missing:
            return None
        chosen.append(group.id)
        missing -= group.sequences
        if missing == 0:
            return chosen
    return None


def _oldest_exact_subset(queue: Sequence[QueuedGroup], batch_size: int) -> list[int] | None:
    within_batch = (1 << (batch_size + 1)) - 1
    reachable = [1]  # reachable[k]: sums that the newest k groups can make, bit s for sum s
    for group in reversed(queue):
        sums = reachable[-1]
        reachable.append((sums | sums << group.sequences) & within_batch)
    if not reachable.pop() >> batch_size & 1:
        return None

    chosen: list[int] = []
    missing = batch_size
    for group in queue:
        rest = reachable.pop()
        if group.sequences <= missing and rest >> (missing - group.sequences) & 1:
            chosen.append(group.id)
            missing -= group.sequences
    return chosen
