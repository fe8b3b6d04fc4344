"""The bridge on an engine that fails, which the real one does not do on demand."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from grpo_core.wire import PolicyVersion
from grpo_vllm import bridge as bridge_module
from grpo_vllm.bridge import BridgeConflict, BridgeTimeout, WeightBridge

NEXT = PolicyVersion(1, 0)


@dataclass
class Engine:
    """Does what it is told, except for the calls named in `hangs`."""

    hangs: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.hangs:
            await asyncio.sleep(3600)

    async def pause(self) -> None:
        await self._call("pause")

    async def resume(self) -> None:
        await self._call("resume")

    async def name_weights(self, version: PolicyVersion) -> None:
        await self._call(f"name {version.epoch}.{version.step}")


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge_module, "ENGINE_CALL_TIMEOUT_S", 0.05)
    monkeypatch.setattr(bridge_module, "HANDOVER_S", 0.05)


async def test_an_update_by_the_book() -> None:
    engine = Engine()
    bridge = WeightBridge(engine)
    session = await bridge.open_session()
    await bridge.pause(session, 10.0, NEXT)
    assert bridge.paused
    await bridge.resume(session, written=True)
    assert not bridge.paused
    assert bridge.version == NEXT
    assert engine.calls == ["pause", "name 1.0", "resume"]


async def test_an_engine_that_does_not_resume_ends_the_server_and_stays_known_as_paused() -> None:
    bridge = WeightBridge(Engine(hangs={"resume"}))
    session = await bridge.open_session()
    await bridge.pause(session, 10.0, NEXT)
    with pytest.raises(BridgeTimeout, match="did not resume"):
        await bridge.resume(session, written=True)
    assert bridge.paused
    assert bridge.broken.is_set()


async def test_an_engine_that_does_not_pause_is_told_to_go_on() -> None:
    engine = Engine(hangs={"pause"})
    bridge = WeightBridge(engine)
    session = await bridge.open_session()
    with pytest.raises(BridgeTimeout, match="did not pause"):
        await bridge.pause(session, 10.0, NEXT)
    assert engine.calls == ["pause", "resume"]
    assert not bridge.paused
    assert not bridge.broken.is_set()


async def test_a_closing_connection_does_not_abandon_the_pause_of_the_next_trainer() -> None:
    bridge = WeightBridge(Engine())
    first = await bridge.open_session()
    await bridge.close_session(first)
    second = await bridge.open_session()
    await bridge.pause(second, 10.0, NEXT)
    await bridge.close_session(first)
    assert bridge.paused
    await bridge.resume(second, written=True)
    assert bridge.weights_intact


async def test_a_lease_that_runs_out_frees_the_place_and_taints_the_weights() -> None:
    engine = Engine()
    bridge = WeightBridge(engine)
    session = await bridge.open_session()
    await bridge.pause(session, 0.01, NEXT)
    await asyncio.sleep(0.05)
    assert not bridge.paused
    assert not bridge.weights_intact
    assert bridge.version == PolicyVersion(1, 0)
    with pytest.raises(BridgeConflict):
        await bridge.resume(session, written=True)
    second = await bridge.open_session()
    await bridge.pause(second, 10.0, PolicyVersion(2, 0))
    await bridge.close_session(session)  # the hung trainer's connection closes at last
    assert bridge.paused
    await bridge.resume(second, written=True)
    assert bridge.weights_intact
