"""Which weights this run has served, kept in Redis.

A server that starts again reads it to know that its checkpoint is older than the run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import structlog

from grpo_core.clients.retry import async_retrying
from grpo_core.errors import GrpoError
from grpo_core.redis.connection import FAILURES, AsyncRedisConnection, words
from grpo_core.redis.keys import served_weights_key
from grpo_core.weights.ref import UNTRAINED, WeightKind, WeightRef
from grpo_core.wire.policy_version import PolicyVersion

log = structlog.get_logger()

ATTEMPT_DEADLINE_S = 0.5
RETRY_S = 1.0
LAST_ATTEMPT_DEADLINE_S = 2.0
"""Of the one when the server ends and Redis has not caught up; well below the grace that it has."""


class RedisUnreachable(GrpoError):
    """Redis did not answer at the start. Without it nobody knows what the run was served."""


class BadServedRecord(GrpoError):
    """The record of this run cannot be understood."""


@dataclass(frozen=True)
class ServedWeights:
    """`intact`: False after a write that was cut short. `model`: what the server was started with,
    "" where nobody said. Untrained weights have a version where the run began with it anew.
    """

    weights: WeightRef
    intact: bool = True
    model: str = ""

    def fields(self) -> dict[str, str | int]:
        """As they are in Redis: `kind` and `path` are empty for weights that are not on disk."""
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
    """Remembers nothing: where no Redis was named."""

    async def read(self, deadline_s: float) -> ServedWeights | None:  # noqa: ARG002
        """What the run was served last; None where it was served nothing yet."""
        return None

    async def save(self, served: ServedWeights) -> None:
        """Returns soon, whether or not it could be written down, and never raises."""


class RedisServedStore(ServedStore, AsyncRedisConnection):
    """Args: url: of Redis; run_id: whose record."""

    def __init__(self, url: str, run_id: str) -> None:
        # The longest that any attempt has; each is bounded by itself.
        super().__init__(url, max(ATTEMPT_DEADLINE_S, LAST_ATTEMPT_DEADLINE_S))
        self._key = served_weights_key(run_id)
        self._latest: ServedWeights | None = None
        self._catching_up: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """What Redis has not learned is written once more: nobody tells it later."""
        if self._catching_up is not None:
            self._catching_up.cancel()
            await asyncio.wait([self._catching_up])
            if self._latest and not await self._write(self._latest, LAST_ATTEMPT_DEADLINE_S):
                log.warning("the weights served last are not in Redis", redis=self._where)
        await super().close()

    async def read(self, deadline_s: float) -> ServedWeights | None:
        """As `ServedStore.read`.

        Raises:
            RedisUnreachable: no answer within the deadline.
            BadServedRecord: somebody else's value under our key.
        """
        try:
            async for attempt in async_retrying(deadline_s, lambda e: isinstance(e, FAILURES)):
                with attempt:
                    fields = await self.attempt("HGETALL", self._key, within_s=ATTEMPT_DEADLINE_S)
        except FAILURES as error:
            raise RedisUnreachable(
                f"Redis at {self._where} did not answer within {deadline_s:g} s "
                f"({error or type(error).__name__}), so it is unknown whether this run was served "
                "other weights than the checkpoint's. Start Redis, mend --redis-url, or leave it "
                "out to serve the checkpoint whatever was served before"
            ) from error
        return _parse(self._key, fields) if fields else None

    async def save(self, served: ServedWeights) -> None:
        """Write down what is served from now on; where Redis is away, as soon as it is back."""
        self._latest = served
        if self._catching_up is None and not await self._write(served):
            log.warning("Redis does not answer; it learns later what is served", redis=self._where)
            self._catching_up = asyncio.create_task(self._catch_up())

    async def _catch_up(self) -> None:
        written = None
        while written != self._latest:
            await asyncio.sleep(RETRY_S)
            latest = self._latest
            if latest is not None and await self._write(latest):
                written = latest
        self._catching_up = None
        log.info("Redis knows again what is served", redis=self._where)

    async def _write(self, served: ServedWeights, within_s: float = ATTEMPT_DEADLINE_S) -> bool:
        fields = {**served.fields(), "time": round(time.time(), 3)}
        try:
            await self.attempt("HSET", self._key, *words(fields), within_s=within_s)
        except FAILURES:
            return False
        return True


def _parse(key: str, fields: dict[str, str]) -> ServedWeights:
    try:
        return ServedWeights.from_fields(fields)
    except (KeyError, ValueError) as error:
        raise BadServedRecord(
            f"Redis holds something else under {key}: {error!r}; delete that key, or start with "
            "another --run-id"
        ) from error


@dataclass(frozen=True)
class InitialWeights:
    """`version` names what the engine holds or, where that is `missing`, what it should hold.

    `new_name`: the version was made up now, so the record must learn it.
    """

    version: PolicyVersion
    missing: bool = False
    new_name: bool = False


def initial_weights_after(served: ServedWeights | None, await_weights: bool) -> InitialWeights:
    """Args:
    served: what the run was served last, None for nothing
    await_weights: hold requests until a trainer has written that back
    """
    if served is None:
        return InitialWeights(UNTRAINED)
    version = served.weights.version
    if not served.weights.trained:
        return InitialWeights(version)
    if await_weights:
        return InitialWeights(version, missing=True)
    # The checkpoint again, in the middle of a run: a name that no trainer has used.
    return InitialWeights(version.next_epoch(), new_name=True)
