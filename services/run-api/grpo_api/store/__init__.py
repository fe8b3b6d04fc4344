"""Stores the run's state in Redis; only this package uses its keys.

Every change to more than one key is one Lua script, so several run-api processes can share a run.
"""

from __future__ import annotations

from grpo_api.store.keys import STATE_KEYS, former_keys
from grpo_api.store.leases import BatchStore
from grpo_api.store.payloads import PayloadStore
from grpo_api.store.queue import GroupStore
from grpo_api.store.redis import RedisLink
from grpo_api.store.registrations import RegistrationStore
from grpo_api.store.stats import StatsStore


class RunStore:
    """Every method raises `StoreUnavailable` if Redis does not answer within the deadline.

    Args:
        environment_timeout_s: an environment counts as disconnected after this long without a poll.
        max_leased_bytes: limit on the stored bytes of unacknowledged batches.
    """

    def __init__(
        self, link: RedisLink, environment_timeout_s: float, max_leased_bytes: int
    ) -> None:
        self._link = link
        self.registrations = RegistrationStore(link, environment_timeout_s)
        self.payloads = PayloadStore(link)
        self.groups = GroupStore(link, self.payloads)
        self.stats = StatsStore(link, environment_timeout_s)
        self.batches = BatchStore(link, max_leased_bytes)

    async def close(self) -> None:
        await self._link.close()

    async def ping(self) -> None:
        await self._link.ping()

    async def reset(self) -> None:
        await self._link.script("reset", ("resets", *STATE_KEYS), others=former_keys(self._link))
