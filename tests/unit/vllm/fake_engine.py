"""Stand-ins: an engine client of vLLM that hangs or fails on demand, and a store in memory."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from grpo_vllm.weights.served_store import ServedStore, ServedWeights
from tests.support.wait import wait_for_async


@dataclass
class FakeEngine:
    """Records its calls. Calls named in `hangs` never return, those in `fails` raise, and those in
    `held` return when their event is set."""

    fails: set[str] = field(default_factory=set)
    hangs: set[str] = field(default_factory=set)
    held: dict[str, asyncio.Event] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    max_tokens: list[int | None] = field(default_factory=lambda: [1000])
    """Of the requests in flight."""

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fails:
            raise RuntimeError(f"{name}: the engine does not like it")
        if name in self.hangs:
            await asyncio.sleep(3600)
        if name in self.held:
            await self.held[name].wait()

    async def called(self, name: str) -> None:
        """Returns when that call has arrived."""
        await wait_for_async(lambda: name in self.calls)

    @property
    def renderer(self) -> FakeEngine:
        return self

    @property
    def engine_core(self) -> FakeEngine:
        return self

    @property
    def output_processor(self) -> SimpleNamespace:
        requests = [SimpleNamespace(max_tokens_param=tokens) for tokens in self.max_tokens]
        return SimpleNamespace(request_states=dict(enumerate(requests)))

    async def clear_mm_cache_async(self) -> None:
        """No test needs to know."""

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        assert clear_cache
        await self._call("pause" if mode == "keep" else "finish and pause")

    async def resume_generation(self) -> None:
        await self._call("resume")

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        await self._call(f"pause_generation {mode} {clear_cache}")

    async def collective_rpc(self, method: str, **_: Any) -> None:
        await self._call(method)

    async def update_weight_version(self, label: str) -> None:
        await self._call(f"name {label}")

    async def reset_prefix_cache(self) -> bool:
        await self._call("reset_prefix_cache")
        return True

    async def sleep(self) -> None:
        await self._call("sleep")

    async def wake_up(self) -> None:
        await self._call("wake_up")


@dataclass
class Record(ServedStore):
    """A store whose entries can be read in order."""

    served: ServedWeights | None = None
    saved: list[ServedWeights] = field(default_factory=list)

    async def read(self, deadline_s: float) -> ServedWeights | None:  # noqa: ARG002
        return self.served

    async def save(self, served: ServedWeights) -> None:
        self.saved.append(served)
