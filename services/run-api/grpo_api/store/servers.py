"""Reads what the inference servers of the run report about themselves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from grpo_api.errors import StoreUnavailable
from grpo_api.store.redis import RedisLink
from grpo_core.weights.servers import ServerState, server_key, servers_key
from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.run_api import ListedServer

READ_EVERY_S = 1.0
"""Environments poll ten times a second, and servers report once a second."""


class ServerCounts(NamedTuple):
    """What metrics show of one server. `state`: "" if it is gone and did not leave."""

    name: str
    state: str
    step: int
    restarts: int
    crashes: int

    @property
    def is_running(self) -> bool:
        return self.state not in ("", ServerState.FAILED)


class ServerRecords:
    """The servers of the run with whose servers the trainer registered.

    Args: clock: in seconds
    """

    def __init__(self, link: RedisLink, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._clock = clock
        self._read_at = -math.inf
        self._found: list[ListedServer] = []

    async def listed(self) -> list[ListedServer]:
        """All servers that are not gone and that others can reach, by name.

        Calls during a read get the previous list.

        Raises:
            StoreUnavailable: Redis did not answer within the deadline.
        """
        now = self._clock()
        if now - self._read_at >= READ_EVERY_S:
            self._read_at = now
            try:
                records = await self._records("url", "epoch", "step", "state")
            except StoreUnavailable:
                self.forget()
                raise
            self._found = [
                ListedServer(
                    name=name, url=url, version=PolicyVersion(int(epoch), int(step)), state=state
                )
                for name, (url, epoch, step, state) in records.items()
                if url and epoch and step and state  # else the record has expired
            ]
        return self._found

    def forget(self) -> None:
        """Read at the next call, because a trainer has registered, perhaps with other servers."""
        self._read_at = -math.inf

    async def counted(self) -> list[ServerCounts] | None:
        """All servers that did not leave, by name; None if none of the run reports itself.

        Raises:
            StoreUnavailable: Redis did not answer within the deadline.
        """
        records = await self._records("state", "step", "restarts", "crashes")
        return [
            ServerCounts(name, state, *(int(count or 0) for count in counts))
            for name, (state, *counts) in records.items()
        ] or None

    async def _records(self, *fields: str) -> dict[str, list[str]]:
        """These fields of all servers that the run ever had, by name; "" for those that are
        missing."""
        followed = (await self._link.call("GET", self._link.followed_server) or b"").decode()
        run_id = followed or self._link.run_id
        members = await self._link.call("SMEMBERS", servers_key(run_id))
        names = sorted(name.decode() for name in members)
        if not names:
            return {}
        records = await self._link.transaction(
            *(("HMGET", server_key(run_id, name), *fields) for name in names)
        )
        return {
            name: [(value or b"").decode() for value in record]
            for name, record in zip(names, records, strict=True)
        }
