"""Records in Redis which weights a run served last, so that a restarted server detects that its own
checkpoint is older than the run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import structlog
from tenacity import AsyncRetrying

from grpo_core.clients.service import retry_policy
from grpo_core.errors import GrpoError
from grpo_core.redis.connection import FAILURES, AsyncRedisConnection, words
from grpo_core.redis.keys import served_weights_followers_key, served_weights_key
from grpo_core.weights.ref import WeightKind, WeightRef
from grpo_core.wire.policy_version import PolicyVersion

log = structlog.get_logger()

ATTEMPT_DEADLINE_S = 0.5
RETRY_S = 1.0
LAST_ATTEMPT_DEADLINE_S = 2.0
"""Deadline of the final write when the server ends; well below the server's own stop deadline."""
_WRITE = """
local first = table.remove(ARGV, 1) == 'first'
local epoch, step = tonumber(table.remove(ARGV, 1)), tonumber(table.remove(ARGV, 1))
local held = redis.call('HMGET', KEYS[1], 'epoch', 'step')
if held[1] then
  local its_epoch, its_step = tonumber(held[1]), tonumber(held[2])
  if first or its_epoch > epoch or (its_epoch == epoch and its_step > step) then
    return
  end
end
redis.call('HSET', KEYS[1], unpack(ARGV))
for _, follower in ipairs(redis.call('SMEMBERS', KEYS[2])) do
  redis.call('HSET', follower, unpack(ARGV))
end
"""
"""Writes the record unless it holds a newer version, which another server of the run serves.

KEYS: the record, and the set of records that follow it. ARGV: `first` to keep an existing record,
otherwise `any`; epoch and step; fields and values."""


class RedisUnreachable(GrpoError):
    """Redis did not answer at the start, so the run's served version is unknown."""


class BadServedRecord(GrpoError):
    """Redis contains an invalid record of the version that the run's server serves."""


@dataclass(frozen=True)
class ServedWeights:
    """`intact`: False for torn weights. `model`: the server's --model, "" if unknown. Untrained
    weights have a version above [0, 0] if the run started again from the model.
    """

    weights: WeightRef
    intact: bool = True
    model: str = ""

    def fields(self) -> dict[str, str | int]:
        """The fields in Redis. `kind` and `path` are empty for weights that are not on disk."""
        weights = self.weights
        return {
            **weights.version.fields(),
            "intact": int(self.intact),
            "trained": int(weights.trained),
            "kind": weights.kind.value if weights.path else "",
            "path": str(weights.path or ""),
            "sha256": weights.digest,
            "model": self.model,
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, str]) -> Self:
        """Raises `KeyError`, `ValueError`."""
        path = fields.get("path")
        in_memory = WeightKind.MEMORY if int(fields["trained"]) else WeightKind.BASE
        weights = WeightRef(
            version=PolicyVersion.from_fields(fields),
            kind=WeightKind(fields["kind"]) if path else in_memory,
            path=Path(path) if path else None,
            digest=fields.get("sha256", ""),
        )
        return cls(weights, bool(int(fields["intact"])), fields.get("model", ""))


class ServedStore:
    """A store that keeps nothing, for servers without Redis."""

    unread = False
    """Redis did not answer at the start, and the server started nevertheless."""

    async def read(self, deadline_s: float) -> ServedWeights | None:  # noqa: ARG002
        """The weights that the run served last; None if it has served none yet."""
        return None

    async def save(self, served: ServedWeights) -> None:
        """Record the served weights. Returns soon, also if that fails, and never raises."""


class RedisServedStore(ServedStore, AsyncRedisConnection):
    """The record of the run `run_id` in Redis.

    Args:
        required: `read` fails without Redis. Otherwise the server starts as if there was no record,
            and uses Redis as soon as it answers.
    """

    def __init__(self, url: str, run_id: str, required: bool = True) -> None:
        # Upper limit for any call. Each call also has its own deadline.
        super().__init__(url, max(ATTEMPT_DEADLINE_S, LAST_ATTEMPT_DEADLINE_S))
        self._key = served_weights_key(run_id)
        self._required = required
        self.unread = False
        self._followers = served_weights_followers_key(run_id)
        self._latest: ServedWeights | None = None
        self._catching_up: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Close the connection. If Redis lacks the newest record, write it one last time."""
        if self._catching_up is not None:
            self._catching_up.cancel()
            await asyncio.wait([self._catching_up])
            if self._latest and not await self._write(self._latest, LAST_ATTEMPT_DEADLINE_S):
                log.warning("served_version.not_saved", redis=self._where)
        await super().close()

    async def read(self, deadline_s: float) -> ServedWeights | None:
        """As `ServedStore.read`.

        Raises:
            RedisUnreachable: Redis did not answer within the deadline.
            BadServedRecord: the key holds another kind of value.
        """
        try:
            limit_s = deadline_s if self._required else 0.0
            policy = retry_policy(limit_s, lambda e: isinstance(e, FAILURES), self.note_absence)
            async for attempt in AsyncRetrying(**policy):
                with attempt:
                    fields = await self.attempt("HGETALL", self._key, within_s=ATTEMPT_DEADLINE_S)
        except FAILURES as error:
            if not self._required:
                self.unread = True
                return None
            raise RedisUnreachable(
                f"Redis at {self._where} did not answer within {deadline_s:g} s "
                f"({error or type(error).__name__}), so the weights that this run served last "
                "are unknown. Start Redis; or correct --redis-url; "
                "or pass --redis-url none to serve the model from disk"
            ) from error
        try:
            return ServedWeights.from_fields(fields) if fields else None
        except (KeyError, ValueError) as error:
            raise BadServedRecord(
                f"Redis key {self._key} does not hold a record of served weights ({error!r}); "
                "delete this Redis key, or start with another --run-id"
            ) from error

    async def save(self, served: ServedWeights) -> None:
        """Record the served weights now or, if Redis is down, as soon as it is back."""
        self._latest = served
        if self._catching_up is None and not await self._write(served):
            log.warning(
                "served_version.save_delayed",
                redis=self._where,
                reason="Redis does not answer",
            )
            self._catching_up = asyncio.create_task(self._catch_up())

    async def _catch_up(self) -> None:
        written = None
        while written != self._latest:
            await asyncio.sleep(RETRY_S)
            latest = self._latest
            if latest is not None and await self._write(latest):
                written = latest
        self._catching_up = None
        log.info("served_version.saved", redis=self._where)

    async def _write(self, served: ServedWeights, within_s: float = ATTEMPT_DEADLINE_S) -> bool:
        fields = {**served.fields(), "time": round(time.time(), 3)}
        try:
            # The model from disk must not replace a record that could not be read at the start.
            when = "first" if self.unread and not served.weights.trained else "any"
            await self.attempt(
                *("EVAL", _WRITE, 2, self._key, self._followers, when),
                *(*served.weights.version, *words(fields)),
                within_s=within_s,
            )
        except FAILURES:
            return False
        return True
