"""Makes the engine pause, resume, sleep and wake up; every call has a deadline."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

from grpo_core.errors import GrpoError
from grpo_core.weights.collective import GroupAddress
from grpo_core.wire.policy_version import PolicyVersion

ENGINE_CALL_TIMEOUT_S = 30.0
UPDATE_TIMEOUT_S = 120.0
"""For loading the weights of a whole model; a CPU packs them for its kernels."""
FINISHED_FIRST_TOKENS = 16
"""On a CPU, a pause waits for the requests in flight if none of them can sample more tokens than
this. That takes less time than computing their KV cache again: with 128 sequences of 26 tokens, a
training step took 7 to 26 % less in three comparisons."""
FINISH_DEADLINE_S = 1.0

T = TypeVar("T")


class EngineTimeout(GrpoError):
    """The engine did not carry out a call within its deadline."""


class EngineControl:
    """Every method raises `EngineTimeout`, or the engine's own error.

    Args:
        engine: vLLM's engine client
        shares_weights: True if the worker has the methods of `weights.loader.WeightExport`
        finished_first_tokens: a pause waits for the requests in flight if none of them can sample
            more tokens than this
        stamps_versions: finished outputs name the weights that sampled each token
        loads_weights: `update_weights` is possible
    """

    def __init__(
        self,
        engine: Any,
        shares_weights: bool = False,
        finished_first_tokens: int = 0,
        *,
        stamps_versions: bool = True,
        loads_weights: bool = True,
    ) -> None:
        self.sleeping = False
        self.broken = False
        """True if the engine cannot serve any more. The process must then end."""
        self._engine = engine
        self._shares_weights = shares_weights
        self._finished_first_tokens = finished_first_tokens
        self._stamps_versions = stamps_versions
        self.loads_weights = loads_weights
        self._group = ""

    async def pause(self) -> None:
        """Stop sampling, keep requests in flight and clear the KV cache. If all requests in flight
        are short, finish them first."""
        try:
            await _in_time("pause", self._pause())
        except EngineTimeout:
            await self.resume()  # the pause may still take effect later; nothing would end it
            raise

    async def resume(self) -> None:
        await self._or_broken("resume", self._engine.resume_generation())

    async def update_weights(self, directory: Path, version: PolicyVersion) -> None:
        """Load the weights of the directory under a pause. The KV cache is cleared. If loading
        fails, the engine holds weights of two versions, so it is broken."""
        await self.pause()
        loading = self._load_from(directory)
        await self._or_broken("load the weights", loading, UPDATE_TIMEOUT_S)
        await self.name_weights(version)
        await self.resume()

    async def join_group(self, address: str, server: str, staging: Path) -> None:
        """Let every worker join this process group, `GroupAddress` as JSON, if it is another one
        than before, and made for this engine. Returns before they have joined."""
        if address in ("", self._group) or not self.loads_weights:
            return
        self._group = address
        pid, _ = GroupAddress.model_validate_json(address).servers.get(server, (0, 0))
        if pid != os.getpid():
            return
        given = {"init_info": {"address": address, "server": server, "staging": str(staging)}}
        calling = self._engine.collective_rpc("init_weight_transfer_engine", kwargs=given)
        await _in_time("join a process group", calling)

    async def name_weights(self, version: PolicyVersion) -> None:
        """Let the engine stamp tokens that it samples from now on, if it can."""
        if self._stamps_versions:
            naming = self._engine.update_weight_version(str(version))
            await self._or_broken("set its policy version", naming)

    async def reset_prefix_cache(self) -> bool:
        """Clear the KV cache of finished requests. False if requests in flight still use it."""
        return bool(await _in_time("reset its prefix cache", self._engine.reset_prefix_cache()))

    async def sleep(self) -> None:
        """Release the engine's GPU memory. Requests in flight are aborted."""
        self.sleeping = True  # set first: a request that arrives from here on would fail
        await _in_time("fall asleep", self._engine.sleep())

    async def wake_up(self) -> None:
        await _in_time("wake up", self._engine.wake_up())
        self.sleeping = False

    async def _pause(self) -> None:
        if not self._stamps_versions:
            await self._engine.pause_generation(mode="keep", clear_cache=True)
        else:
            # As `pause_generation`, which then sleeps for 20 ms to let outputs arrive. Those are
            # stamped, so they may arrive later.
            await self._engine.renderer.clear_mm_cache_async()
            if not await self._finish_short_requests():
                await self._pause_scheduler("keep")
        if self._shares_weights:
            # The scheduler has stopped, but queued kernels may still read the weights.
            await self._engine.collective_rpc("wait_for_device")

    async def _finish_short_requests(self) -> bool:
        """Pause once the requests in flight have finished; False if they may take long."""
        requests = self._engine.output_processor.request_states.values()
        limits = (request.max_tokens_param for request in requests)
        if not all(n is not None and n <= self._finished_first_tokens for n in limits):
            return False
        try:
            async with asyncio.timeout(FINISH_DEADLINE_S):
                await self._pause_scheduler("wait")
        except TimeoutError:
            return False
        return True

    async def _pause_scheduler(self, mode: str) -> None:
        await self._engine.engine_core.pause_scheduler_async(mode=mode, clear_cache=True)

    async def _load_from(self, directory: Path) -> None:
        """With the backend `engine.vllm_compat.staged_update`."""
        update = {"update_info": {"directory": str(directory)}}
        await self._engine.collective_rpc("start_weight_update")
        await self._engine.collective_rpc("update_weights", kwargs=update)
        await self._engine.collective_rpc("finish_weight_update")

    async def _or_broken(
        self, what: str, call: Awaitable[None], within_s: float = ENGINE_CALL_TIMEOUT_S
    ) -> None:
        try:
            await _in_time(what, call, within_s)
        except Exception:  # the engine raises its internal errors unchanged
            self.broken = True
            raise


async def _in_time(what: str, call: Awaitable[T], within_s: float = ENGINE_CALL_TIMEOUT_S) -> T:
    try:
        async with asyncio.timeout(within_s):
            return await call
    except TimeoutError:
        raise EngineTimeout(
            f"the engine did not {what} within {within_s:g} s; see the server log"
        ) from None
