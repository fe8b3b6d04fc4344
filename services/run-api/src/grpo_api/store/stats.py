"""Reads the counters of a run, for metrics and operators."""

from __future__ import annotations

from typing import NamedTuple

from grpo_api.store.redis import RedisLink
from grpo_core.wire.run_api import EnvironmentCount


class RunStats(NamedTuple):
    """Counters of a run at one moment, in the order in which `read_stats` returns them.

    Attributes:
        step: batches handed out, counted from the run's starting step.
        deliveries: batches handed out for the first time.
        acknowledged_through: id of the batch up to which all are acknowledged.
        redeliveries: batches handed out again.
        queued_groups: each group of a bundle counts.
        queued_bytes: compressed, as stored, like `buffered_bytes` and `leased_bytes`.
        buffered_parts: parts in the buffers of all environments.
        oldest_lease_age_ms: time since the oldest lease was first handed out; 0 if there is none.
        oldest_queued_age_ms: time since the oldest queued group was queued; 0 if there is none.
        environments_alive: environments that did not disconnect and polled lately.
        leased_batches: batches handed out and not acknowledged.
    """

    step: int
    deliveries: int
    acknowledged_through: int
    redeliveries: int
    queued_groups: int
    queued_sequences: int
    queued_bytes: int
    buffered_parts: int
    buffered_bytes: int
    leased_bytes: int
    oldest_lease_age_ms: int
    oldest_queued_age_ms: int
    environments_alive: int
    environments_registered: int
    leased_batches: int

    @property
    def acknowledged_batches(self) -> int:
        return self.deliveries - self.leased_batches

    @property
    def oldest_lease_age_s(self) -> float:
        return self.oldest_lease_age_ms / 1000

    @property
    def oldest_queued_age_s(self) -> float:
        return self.oldest_queued_age_ms / 1000


class StatsStore:
    def __init__(self, link: RedisLink, environment_timeout_s: float) -> None:
        self._link = link
        self._timeout_ms = int(environment_timeout_s * 1000)

    async def read(self) -> RunStats:
        """All counters at one moment. The cost does not grow with the queue."""
        answer = await self._link.script(
            "read_stats",
            (
                *("trainer", "totals", "leases", "connected", "seen", "environments", "queue"),
                "queued_kinds",
            ),
            self._timeout_ms,
        )
        return RunStats(*answer)

    async def environments(self) -> EnvironmentCount:
        stats = await self.read()
        return EnvironmentCount(
            registered=stats.environments_registered, connected=stats.environments_alive
        )
