"""The bridge on an engine that fails, which the real one does not do on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from grpo_core.wire import PolicyVersion
from grpo_vllm import bridge as bridge_module
from grpo_vllm import engine_switch
from grpo_vllm.bridge import BridgeConflict, WeightBridge
from grpo_vllm.engine_switch import EngineTimeout
from grpo_vllm.serving_state import ServingState
from tests.unit.vllm.fake_engine import FakeEngine

NEXT = PolicyVersion(1, 0)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_switch, "ENGINE_CALL_TIMEOUT_S", 0.05)
    monkeypatch.setattr(bridge_module, "HANDOVER_S", 0.05)


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10.0):
        while not condition():
            await asyncio.sleep(0)


async def test_an_update_by_the_book() -> None:
    engine = FakeEngine()
    bridge = WeightBridge(engine)
    session = await bridge.open_session()
    await bridge.pause(session, 10.0, NEXT)
    assert bridge.paused
    await bridge.resume(session, written=True)
    assert not bridge.paused
    assert bridge.version == NEXT
    assert engine.calls == ["pause", "name 1.0", "resume"]


async def test_an_engine_that_does_not_resume_ends_the_server_and_stays_known_as_paused() -> None:
    bridge = WeightBridge(FakeEngine(hangs={"resume"}))
    session = await bridge.open_session()
    await bridge.pause(session, 10.0, NEXT)
    with pytest.raises(EngineTimeout, match="did not resume"):
        await bridge.resume(session, written=True)
    assert bridge.paused
    assert bridge.engine.broken


async def test_an_engine_that_does_not_pause_is_told_to_go_on() -> None:
    engine = FakeEngine(hangs={"pause"})
    bridge = WeightBridge(engine)
    session = await bridge.open_session()
    with pytest.raises(EngineTimeout, match="did not pause"):
        await bridge.pause(session, 10.0, NEXT)
    assert engine.calls == ["pause", "resume"]
    assert not bridge.paused
    assert not bridge.engine.broken


async def test_a_trainer_that_leaves_while_its_pause_is_carried_out_leaves_nothing_paused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_switch, "ENGINE_CALL_TIMEOUT_S", 10.0)
    at_rest = asyncio.Event()
    engine = FakeEngine(held={"pause": at_rest})
    bridge = WeightBridge(engine)
    session = await bridge.open_session()
    pausing = asyncio.create_task(bridge.pause(session, 10.0, NEXT))
    await eventually(lambda: engine.calls == ["pause"])
    closing = asyncio.create_task(bridge.close_session(session))
    await asyncio.sleep(0)
    at_rest.set()
    with pytest.raises(BridgeConflict, match="is not attached to this server"):
        await pausing
    await closing
    assert engine.calls == ["pause", "resume"]
    assert not bridge.paused
    assert bridge.weights_intact  # it was never told that it may write
    second = await bridge.open_session()
    await bridge.pause(second, 10.0, NEXT)
    assert bridge.paused


async def test_a_closing_connection_does_not_abandon_the_pause_of_the_next_trainer() -> None:
    bridge = WeightBridge(FakeEngine())
    first = await bridge.open_session()
    await bridge.close_session(first)
    second = await bridge.open_session()
    await bridge.pause(second, 10.0, NEXT)
    await bridge.close_session(first)
    assert bridge.paused
    await bridge.resume(second, written=True)
    assert bridge.weights_intact


async def test_a_lease_that_runs_out_frees_the_place_and_taints_the_weights() -> None:
    engine = FakeEngine()
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


async def test_asking_again_extends_the_lease() -> None:
    """A stalled machine cannot come between: nothing else runs from the one call to the other."""
    bridge = WeightBridge(FakeEngine())
    session = await bridge.open_session()
    await bridge.pause(session, 0.01, NEXT)
    await bridge.pause(session, 10.0, NEXT)
    await asyncio.sleep(0.05)
    assert bridge.paused
    await bridge.resume(session, written=False)
    assert bridge.weights_intact


async def test_nobody_gets_in_before_torn_weights_are_called_torn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bridge_module, "HANDOVER_S", 5.0)
    bridge = WeightBridge(FakeEngine())
    await bridge.pause(await bridge.open_session(), 0.01, NEXT)
    await bridge.open_session()
    assert not bridge.weights_intact
    assert not bridge.paused


async def test_of_two_trainers_at_the_door_one_is_let_in() -> None:
    bridge = WeightBridge(FakeEngine())
    first = await bridge.open_session()
    waiting = [asyncio.create_task(bridge.open_session()) for _ in range(2)]
    await asyncio.sleep(0)
    await bridge.close_session(first)
    second, refused = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(second, str)
    assert isinstance(refused, BridgeConflict)
    await bridge.pause(second, 10.0, NEXT)
    assert bridge.paused


async def test_a_lease_that_runs_out_while_its_connection_closes_lets_one_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ends of the session open the door; the later finds the next trainer attached."""
    monkeypatch.setattr(engine_switch, "ENGINE_CALL_TIMEOUT_S", 10.0)
    monkeypatch.setattr(bridge_module, "HANDOVER_S", 10.0)
    named = asyncio.Event()
    engine = FakeEngine(held={"name 1.0": named})
    bridge = WeightBridge(engine)
    first = await bridge.open_session()
    await bridge.pause(first, 0.05, NEXT)
    closing = asyncio.create_task(bridge.close_session(first))
    await eventually(lambda: engine.calls == ["pause", "name 1.0"])
    entering = asyncio.create_task(bridge.open_session())
    stray = asyncio.create_task(bridge.pause("unknown", 10.0, NEXT))  # so that one comes between
    await asyncio.sleep(0.1)  # the lease runs out
    named.set()
    await closing
    await entering
    with pytest.raises(BridgeConflict):
        await stray
    monkeypatch.setattr(bridge_module, "HANDOVER_S", 0.05)
    with pytest.raises(BridgeConflict, match="another trainer is attached"):
        await bridge.open_session()


async def test_an_engine_that_does_not_take_a_name_ends_the_server() -> None:
    """Otherwise it would serve the new weights under the old name."""
    bridge = WeightBridge(FakeEngine(hangs={"name 1.0"}))
    session = await bridge.open_session()
    await bridge.pause(session, 10.0, NEXT)
    with pytest.raises(EngineTimeout, match="did not name its weights"):
        await bridge.resume(session, written=True)
    assert bridge.engine.broken
    assert bridge.version == PolicyVersion(0, 0)


async def test_a_sleeping_engine_says_so_until_it_is_awake() -> None:
    engine = FakeEngine(hangs={"sleep"})
    bridge = WeightBridge(engine)
    with pytest.raises(EngineTimeout, match="did not fall asleep"):
        await bridge.engine.sleep()
    refusal = bridge.refusal()  # half asleep is as bad
    assert bridge.state is ServingState.SLEEPING
    assert refusal is not None
    assert not refusal.hold
    assert "/bridge/wake_up" in refusal.reason
    await bridge.engine.wake_up()
    assert bridge.refusal() is None


async def test_an_update_notice_leaves_the_version_alone() -> None:
    engine = FakeEngine()
    bridge = WeightBridge(engine)
    assert await bridge.take_notice()
    assert engine.calls == ["reset_prefix_cache"]
    assert (bridge.notice_count, bridge.update_count) == (1, 0)
    assert bridge.version == PolicyVersion(0, 0)
