"""The bridge with an engine that fails on demand, which the real engine cannot do."""

from __future__ import annotations

import asyncio

import pytest

from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.engine.engine_client import EngineControl, EngineTimeout
from grpo_vllm.http.readiness_gate import ServingState
from grpo_vllm.weights.write_lease import HANDOVER_S, BridgeConflict, WeightBridge
from tests.unit.vllm.fake_engine import FakeEngine

NEXT, LATER = PolicyVersion(1, 0), PolicyVersion(2, 0)
LEASE_S = 60.0


async def paused(engine: FakeEngine, lease_s: float = LEASE_S) -> tuple[WeightBridge, str]:
    """The bridge, and the session of a trainer that holds the pause."""
    bridge = WeightBridge(EngineControl(engine))
    session = await bridge.open_session()
    await bridge.pause(session, lease_s, NEXT)
    assert bridge.paused
    return bridge, session


@pytest.mark.parametrize(
    ("max_tokens", "expected"),
    [
        ([], ["finish and pause"]),
        ([8, 16], ["finish and pause"]),
        ([8, 17], ["pause"]),
        ([8, None], ["pause"]),
    ],
)
async def test_a_pause_finishes_requests_only_if_all_are_short(
    max_tokens: list[int | None], expected: list[str]
) -> None:
    engine = FakeEngine(max_tokens=max_tokens)
    await EngineControl(engine, finished_first_tokens=16).pause()
    assert engine.calls == expected


async def test_short_requests_that_take_long_are_not_waited_for() -> None:
    engine = FakeEngine(max_tokens=[8], hangs={"finish and pause"})
    await EngineControl(engine, finished_first_tokens=16).pause()
    assert engine.calls == ["finish and pause", "pause"]


async def test_an_engine_that_stamps_no_versions_is_paused_by_vllm_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(FakeEngine, "update_weight_version")  # vLLM 0.24
    engine = FakeEngine(max_tokens=[8])
    await EngineControl(engine, finished_first_tokens=16).pause()
    assert engine.calls == ["pause_generation keep True"]


@pytest.mark.parametrize("how", ["hangs", "fails"])
@pytest.mark.parametrize(
    ("call", "what", "served"),
    [
        ("resume", "resume", NEXT),
        # Otherwise the engine would serve the new weights under the previous version.
        ("name 1.0", "name|policy version", PolicyVersion(0, 0)),
    ],
)
async def test_an_engine_that_does_not_go_on_ends_the_server_and_stays_known_as_paused(
    how: str, call: str, what: str, served: PolicyVersion
) -> None:
    bridge, session = await paused(FakeEngine(**{how: {call}}))
    with pytest.raises((EngineTimeout, RuntimeError), match=what):
        await bridge.resume(session, written=True)
    assert bridge.paused
    assert bridge.engine.broken
    assert bridge.version == served


async def test_an_engine_that_does_not_pause_is_told_to_go_on() -> None:
    engine = FakeEngine(hangs={"pause"})
    bridge = WeightBridge(EngineControl(engine))
    session = await bridge.open_session()
    with pytest.raises(EngineTimeout, match="did not pause"):
        await bridge.pause(session, LEASE_S, NEXT)
    assert engine.calls == ["pause", "resume"]
    assert not bridge.paused
    assert not bridge.engine.broken


async def test_a_trainer_that_leaves_while_its_pause_is_carried_out_leaves_nothing_paused() -> None:
    at_rest = asyncio.Event()
    engine = FakeEngine(held={"pause": at_rest})
    bridge = WeightBridge(EngineControl(engine))
    session = await bridge.open_session()
    pausing = asyncio.create_task(bridge.pause(session, LEASE_S, NEXT))
    await engine.called("pause")
    closing = asyncio.create_task(bridge.close_session(session))
    await asyncio.sleep(1.0)  # virtual time: until both wait
    at_rest.set()
    with pytest.raises(BridgeConflict, match="is not attached to this server"):
        await pausing
    await closing
    assert engine.calls == ["pause", "resume"]
    assert not bridge.paused
    assert bridge.weights_intact, "it was never told that it may write"
    await bridge.pause(await bridge.open_session(), LEASE_S, NEXT)
    assert bridge.paused


async def test_a_lease_that_runs_out_frees_the_place_and_taints_the_weights() -> None:
    bridge, session = await paused(FakeEngine())
    await asyncio.sleep(LEASE_S + 1.0)
    assert not bridge.paused
    assert not bridge.weights_intact
    assert bridge.version == PolicyVersion(1, 0), "the epoch after (0, 0)"
    with pytest.raises(BridgeConflict, match="does not hold the pause"):
        await bridge.resume(session, written=True)
    second = await bridge.open_session()
    await bridge.pause(second, LEASE_S, LATER)
    await bridge.close_session(session)  # the hung trainer's connection closes late
    assert bridge.paused
    await bridge.resume(second, written=True)
    assert bridge.weights_intact


async def test_asking_again_extends_the_lease() -> None:
    bridge, session = await paused(FakeEngine())
    await asyncio.sleep(LEASE_S - 1.0)
    await bridge.pause(session, LEASE_S, NEXT)
    await asyncio.sleep(LEASE_S - 1.0)
    assert bridge.paused
    await asyncio.sleep(2.0)
    assert not bridge.paused


async def test_a_pause_that_ended_in_time_leaves_no_lease_behind() -> None:
    bridge, session = await paused(FakeEngine())
    await bridge.resume(session, written=True)
    await asyncio.sleep(2 * LEASE_S)
    await bridge.pause(session, LEASE_S, LATER)  # by the trainer that is still attached
    await bridge.resume(session, written=True)
    assert bridge.version == LATER
    assert bridge.weights_intact


async def test_of_two_trainers_that_wait_one_is_let_in() -> None:
    bridge = WeightBridge(EngineControl(FakeEngine()))
    first = await bridge.open_session()
    waiting = [asyncio.create_task(bridge.open_session()) for _ in range(2)]
    await asyncio.sleep(HANDOVER_S / 2)
    await bridge.close_session(first)
    second, refused = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(refused, BridgeConflict)
    assert isinstance(second, str)
    await bridge.pause(second, LEASE_S, NEXT)
    assert bridge.paused


async def test_a_sleeping_engine_says_so_until_it_is_awake() -> None:
    bridge = WeightBridge(EngineControl(FakeEngine(hangs={"sleep"})))
    with pytest.raises(EngineTimeout, match="did not fall asleep"):
        await bridge.engine.sleep()
    refusal = bridge.refusal()  # an engine that failed to sleep also refuses requests
    assert bridge.state is ServingState.SLEEPING
    assert refusal is not None
    assert not refusal.hold
    assert "/bridge/wake_up" in refusal.reason
    await bridge.engine.wake_up()
    assert bridge.refusal() is None
