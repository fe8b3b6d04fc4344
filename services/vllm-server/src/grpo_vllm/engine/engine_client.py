"""Control of vLLM's engine client: pause, version, cache and sleep, each call with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from grpo_core.errors import GrpoError
from grpo_core.wire.policy_version import PolicyVersion

ENGINE_CALL_TIMEOUT_S = 30.0

T = TypeVar("T")


class EngineTimeout(GrpoError):
    """The engine did not do in time what it was told."""


class EngineControl:
    """Every method raises `EngineTimeout`, or what the engine raises.

    Args:
        engine: vLLM's engine client
        shares_weights: the worker has the methods of `grpo_vllm.engine.worker_extension`
    """

    def __init__(self, engine: Any, shares_weights: bool = False) -> None:
        self.sleeping = False
        self.broken = False
        """The engine cannot be brought to serve again: the process must end."""
        self._engine = engine
        self._shares_weights = shares_weights

    async def pause(self) -> None:
        """Stop scheduling, keep requests in flight, forget all keys and values."""
        try:
            await _in_time("pause", self._pause())
        except EngineTimeout:
            await self.resume()  # it may still come to rest, with nobody to wake it
            raise

    async def resume(self) -> None:
        await self._or_broken("resume", self._engine.resume_generation())

    async def name_weights(self, version: PolicyVersion) -> None:
        """Have the engine stamp what it samples from now on, where it can (vLLM 0.32)."""
        if stamps_versions(self._engine):
            label = str(version)
            await self._or_broken("name its weights", self._engine.update_weight_version(label))

    async def reset_prefix_cache(self) -> bool:
        """Forget the keys and values of finished requests. False: some are in use."""
        return bool(await _in_time("reset its prefix cache", self._engine.reset_prefix_cache()))

    async def sleep(self) -> None:
        """Give memory back. Requests in flight are aborted."""
        self.sleeping = True  # from here on nothing good comes of a request
        await _in_time("fall asleep", self._engine.sleep())

    async def wake_up(self) -> None:
        await _in_time("wake up", self._engine.wake_up())
        self.sleeping = False

    async def _pause(self) -> None:
        await self._engine.pause_generation(mode="keep", clear_cache=True)
        if self._shares_weights:
            # The scheduler is at rest, and kernels that read the weights may still be queued.
            await self._engine.collective_rpc("wait_for_device")

    async def _or_broken(self, what: str, call: Awaitable[None]) -> None:
        try:
            await _in_time(what, call)
        except Exception:  # the engine passes on whatever went wrong in it
            self.broken = True
            raise


def stamps_versions(engine: Any) -> bool:
    """True where finished outputs say which weights sampled which tokens."""
    return hasattr(engine, "update_weight_version")


async def _in_time(what: str, call: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(ENGINE_CALL_TIMEOUT_S):
            return await call
    except TimeoutError:
        raise EngineTimeout(
            f"the engine did not {what} within {ENGINE_CALL_TIMEOUT_S:g} s; see the server log"
        ) from None
