"""The run in numbers, for whoever watches it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunFacts:
    """What a run holds at one moment, read from Redis at a cost that does not grow with the queue.

    Attributes:
        step: batches handed out, counted from the run's starting step.
        queued_groups: the groups of a bundle count one by one.
        queued_bytes: as stored, compressed; so are `buffered_bytes` and `leased_bytes`.
        buffered_parts: parts of groups that wait for the rest, of all environments.
        leased_batches: handed out and not acknowledged.
        oldest_lease_age_s: since the oldest of those was handed out first; 0 where there is none.
        oldest_queued_age_s: since the oldest group in the queue came; 0 where it is empty.
        deliveries: batches handed out for the first time, since the run began.
        redeliveries: batches handed out again.
        acknowledged_batches: batches that the trainer has made durable.
        environments_alive: registered, not disconnected, and not silent for too long.
    """

    step: int
    queued_groups: int
    queued_sequences: int
    queued_bytes: int
    buffered_parts: int
    buffered_bytes: int
    leased_batches: int
    leased_bytes: int
    oldest_lease_age_s: float
    oldest_queued_age_s: float
    deliveries: int
    redeliveries: int
    acknowledged_batches: int
    environments_alive: int
    environments_registered: int
