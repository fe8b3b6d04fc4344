"""The run in numbers, for whoever watches it."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_api.store.keys import keys
from grpo_api.store.redis import RedisLink
from grpo_api.store.run_facts import RunFacts
from grpo_core.wire import EnvironmentCount


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
