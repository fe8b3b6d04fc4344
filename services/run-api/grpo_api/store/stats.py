"""Counts refused groups, and reads all counters of a run for metrics, operators and the trainer."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import structlog

from grpo_api.errors import StoreUnavailable
from grpo_api.store.keys import RECEIPT_S, receipt_key
from grpo_api.store.redis import RedisLink
from grpo_core.wire.run_api import EnvironmentCount

MAX_REASON_CHARS = 300
_COUNTING_S = 1.0
_RECEIPT_WITHOUT_KEY_S = 10
"""Longer than `_COUNTING_S`, within which one call may repeat its command. Short, so that a flood
of invalid requests does not fill Redis."""
_log = structlog.get_logger()


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
        refused_groups: as in `EnvironmentCount`, like `last_refusal`.
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
    refused_groups: int
    last_refusal: str

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
                *("queued_kinds", "refusals"),
            ),
            self._timeout_ms,
        )
        return RunStats(*answer)._replace(last_refusal=answer[-1].decode())

    async def environments(self) -> EnvironmentCount:
        stats = await self.read()
        return EnvironmentCount(
            registered=stats.environments_registered,
            connected=stats.environments_alive,
            refused_groups=stats.refused_groups,
            last_refusal=stats.last_refusal,
        )

    async def count_refusal(
        self, reason: str, groups: int = 1, env_id: int | None = None, key: str | None = None
    ) -> None:
        """Count the groups of one refused submission. A failure is only logged, because the sender
        needs the reason for the refusal and not that of the failure.

        Args:
            groups: 1 for a body that could not be read.
            env_id: None if it is unknown.
            key: idempotency key of the submission.
        """
        line = refusal_line(reason, env_id)
        # the same key may come with other groups, for another reason
        receipt = receipt_key(key and f"refusal {key} {line}")
        try:
            async with asyncio.timeout(_COUNTING_S):
                await self._link.script(
                    "count_refusal",
                    ("trainer", "refusals", "resets", receipt),
                    RECEIPT_S if key else _RECEIPT_WITHOUT_KEY_S,
                    groups,
                    line,
                )
        except (StoreUnavailable, TimeoutError) as error:
            _log.warning("refusal.not_counted", refusal=line, reason=str(error))


def refusal_line(reason: str, env_id: int | None = None) -> str:
    """The first line of the reason, without control characters, which could change a terminal.

    The reason may quote names from the body.
    """
    sender = "" if env_id is None else f"env_id {env_id}: "
    first = reason.strip().split("\n", 1)[0]
    shown = "".join(char if char.isprintable() else "?" for char in first)
    return (sender + shown)[:MAX_REASON_CHARS]
