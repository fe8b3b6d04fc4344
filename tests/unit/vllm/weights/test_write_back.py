"""The bridge of an engine that restarted during a run: which requests pass, with which version."""

from __future__ import annotations

import asyncio

import pytest

from grpo_core.weights.ref import WeightKind, WeightRef
from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.engine.engine_client import EngineControl
from grpo_vllm.http.readiness_gate import ServingState
from grpo_vllm.weights.served_store import ServedWeights
from grpo_vllm.weights.write_lease import BridgeConflict, WeightBridge
from tests.unit.vllm.fake_engine import FakeEngine, Record

SERVED_BEFORE = PolicyVersion(2, 7)
DEADLINE_S = 300.0


@pytest.fixture
def record() -> Record:
    return Record()


@pytest.fixture
async def bridge(record: Record) -> WeightBridge:
    """The bridge of a restarted engine."""
    bridge = WeightBridge(EngineControl(FakeEngine()), SERVED_BEFORE, record)
    bridge.write_back.begin(SERVED_BEFORE, DEADLINE_S)
    return bridge


async def write_back(bridge: WeightBridge, version: PolicyVersion) -> None:
    session = await bridge.open_session()
    await bridge.pause(session, 10.0, version)
    await bridge.resume(session, written=True)
    await bridge.close_session(session)


@pytest.mark.parametrize("version", [SERVED_BEFORE, PolicyVersion(2, 8), PolicyVersion(3, 0)])
async def test_it_serves_once_the_same_or_later_weights_are_back(
    bridge: WeightBridge, record: Record, version: PolicyVersion
) -> None:
    refusal = bridge.refusal()
    assert bridge.state is ServingState.AWAITING_WEIGHTS
    assert refusal is not None
    assert refusal.hold
    assert "[2, 7]" in refusal.reason
    await write_back(bridge, version)
    await asyncio.sleep(2 * DEADLINE_S)
    assert bridge.refusal() is None
    assert bridge.state is ServingState.SERVING
    assert bridge.version == version
    assert record.saved == [ServedWeights(WeightRef(version=version, kind=WeightKind.MEMORY))]


async def test_older_weights_are_refused_and_the_same_ones_when_they_are_back(
    bridge: WeightBridge,
) -> None:
    session = await bridge.open_session()
    with pytest.raises(BridgeConflict, match="is not newer than"):
        await bridge.pause(session, 10.0, PolicyVersion(2, 6))
    assert bridge.state is ServingState.AWAITING_WEIGHTS
    await bridge.close_session(session)
    await write_back(bridge, SERVED_BEFORE)
    with pytest.raises(BridgeConflict, match="is not newer than"):
        await write_back(bridge, SERVED_BEFORE)


async def test_a_pause_that_wrote_nothing_changes_nothing(
    bridge: WeightBridge, record: Record
) -> None:
    session = await bridge.open_session()
    await bridge.pause(session, 10.0, SERVED_BEFORE)
    await bridge.resume(session, written=False)
    assert bridge.state is ServingState.AWAITING_WEIGHTS
    assert record.saved == []


async def test_a_trainer_cut_off_while_it_writes_back_may_try_again(
    bridge: WeightBridge, record: Record
) -> None:
    session = await bridge.open_session()
    await bridge.pause(session, 10.0, SERVED_BEFORE)
    await bridge.close_session(session)
    assert bridge.state is ServingState.AWAITING_WEIGHTS
    assert not bridge.paused
    assert not bridge.weights_intact
    assert record.saved == []  # no request is answered with them, so they need no new version
    await write_back(bridge, SERVED_BEFORE)
    assert bridge.weights_intact
    assert bridge.refusal() is None


async def test_beyond_the_deadline_requests_are_refused_at_once_until_a_trainer_comes(
    bridge: WeightBridge,
) -> None:
    await bridge.write_back.wait(2 * DEADLINE_S)
    assert asyncio.get_running_loop().time() == pytest.approx(DEADLINE_S), "held requests wake"
    refusal = bridge.refusal()
    assert bridge.state is ServingState.FAILED
    assert refusal is not None
    assert not refusal.hold
    assert "Start the trainer again" in refusal.reason
    await write_back(bridge, SERVED_BEFORE)
    assert bridge.state is ServingState.SERVING
