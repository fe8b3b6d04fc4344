"""The run in numbers, for operators and metrics."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_api.store.keys import keys
from grpo_api.store.redis import RedisLink
from grpo_core.wire import EnvironmentCount


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


class FactStore:
    def __init__(self, link: RedisLink, environment_timeout_s: float) -> None:
        self._link = link
        self._timeout_ms = int(environment_timeout_s * 1000)

    async def read(self) -> RunFacts:
        """At one moment, at a cost that does not grow with the queue."""
        answer = await self._link.script(
            "read_facts",
            keys(
                self._link,
                *("trainer", "totals", "leases", "connected", "seen", "environments", "queue"),
                "queued_kinds",
            ),
            self._timeout_ms,
        )
        found = _Answer(*answer)
        return RunFacts(
            step=found.step,
            queued_groups=found.queued_groups,
            queued_sequences=found.queued_sequences,
            queued_bytes=found.queued_bytes,
            buffered_parts=found.buffered_parts,
            buffered_bytes=found.buffered_bytes,
            leased_batches=found.leased,
            leased_bytes=found.leased_bytes,
            oldest_lease_age_s=found.oldest_lease_ms / 1000,
            oldest_queued_age_s=found.oldest_queued_ms / 1000,
            deliveries=found.last_batch,
            redeliveries=found.redeliveries,
            acknowledged_batches=found.last_batch - found.leased,
            environments_alive=found.alive,
            environments_registered=found.registered,
        )

    async def environments(self) -> EnvironmentCount:
        facts = await self.read()
        return EnvironmentCount(
            registered=facts.environments_registered, connected=facts.environments_alive
        )


@dataclass(frozen=True)
class _Answer:
    """What `read_facts` returns, in its order."""

    step: int
    last_batch: int
    acknowledged: int
    redeliveries: int
    queued_groups: int
    queued_sequences: int
    queued_bytes: int
    buffered_parts: int
    buffered_bytes: int
    leased_bytes: int
    oldest_lease_ms: int
    oldest_queued_ms: int
    alive: int
    registered: int
    leased: int
