"""Commands to the engine, each with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Protocol, TypeVar

from grpo_core.errors import GrpoError
from grpo_core.wire import PolicyVersion

ENGINE_CALL_TIMEOUT_S = 30.0

T = TypeVar("T")


class EngineTimeout(GrpoError):
    """The engine did not do in time what it was told."""


class Engine(Protocol):
    async def pause(self) -> None:
        """Stop scheduling, keep requests in flight, forget all keys and values."""

    async def resume(self) -> None: ...

    async def name_weights(self, version: PolicyVersion) -> None:
        """Stamp what is sampled from now on."""

    async def reset_prefix_cache(self) -> bool:
        """Forget the keys and values of finished requests. False: some are in use."""

    async def sleep(self) -> None:
        """Give memory back. Requests in flight are aborted."""

    async def wake_up(self) -> None: ...


class EngineSwitch:
    """`Engine` with deadlines. Every method raises `EngineTimeout`, or what the engine raises.

    Args: engine: what is switched.
    """

    def __init__(self, engine: Engine) -> None:
        self.sleeping = False
        self.broken = False
        """The engine cannot be brought to serve again: the process must end."""
        self._engine = engine

    async def pause(self) -> None:
        try:
            await _in_time("pause", self._engine.pause())
        except EngineTimeout:
            await self.resume()  # it may still come to rest, with nobody to wake it
            raise

    async def resume(self) -> None:
        await self._or_broken("resume", self._engine.resume())

    async def name_weights(self, version: PolicyVersion) -> None:
        await self._or_broken("name its weights", self._engine.name_weights(version))

    async def reset_prefix_cache(self) -> bool:
        return await _in_time("reset its prefix cache", self._engine.reset_prefix_cache())

    async def sleep(self) -> None:
        self.sleeping = True  # from here on nothing good comes of a request
        await _in_time("fall asleep", self._engine.sleep())

    async def wake_up(self) -> None:
        await _in_time("wake up", self._engine.wake_up())
        self.sleeping = False

    async def _or_broken(self, what: str, call: Awaitable[None]) -> None:
        try:
            await _in_time(what, call)
        except Exception:  # the engine passes on whatever went wrong in it
            self.broken = True
            raise


async def _in_time(what: str, call: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(ENGINE_CALL_TIMEOUT_S):
            return await call
    except TimeoutError:
        raise EngineTimeout(
            f"the engine did not {what} within {ENGINE_CALL_TIMEOUT_S:g} s; see the server log"
        ) from None
