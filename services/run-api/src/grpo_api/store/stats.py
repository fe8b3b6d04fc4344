"""The run in numbers, for operators and metrics."""

from __future__ import annotations

from typing import NamedTuple

from grpo_api.store.redis import RedisLink
from grpo_core.wire.run_api import EnvironmentCount


class RunStats(NamedTuple):
    """What a run holds at one moment; the fields in the order in which `read_stats` returns them.

    Attributes:
        step: batches handed out, counted from the run's starting step.
        deliveries: batches handed out for the first time, since the run began.
        acknowledged_through: id of the batch up to which all are acknowledged.
        redeliveries: batches handed out again.
        queued_groups: the groups of a bundle count one by one.
        queued_bytes: as stored, compressed; so are `buffered_bytes` and `leased_bytes`.
        buffered_parts: parts of groups that wait for the rest, of all environments.
        oldest_lease_age_ms: since the oldest lease was handed out first; 0 where there is none.
        oldest_queued_age_ms: since the oldest group in the queue came; 0 where it is empty.
        environments_alive: registered, not disconnected, and not silent for too long.
        leased_batches: handed out and not acknowledged.
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
        """At one moment, at a cost that does not grow with the queue."""
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
