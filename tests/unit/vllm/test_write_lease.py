"""The bridge with an engine that fails on demand, which the real engine cannot do.

The last part is the bridge of an engine that restarted during a run: which requests pass, with
which version.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from grpo_core.settings import load_settings
from grpo_core.tree.server import ServerSettings
from grpo_core.weights.ref import WeightKind, WeightRef
from grpo_core.weights.servers import EngineState
from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.engine.control import EngineControl, EngineTimeout
from grpo_vllm.weights.served_store import ServedWeights
from grpo_vllm.weights.write_lease import (
    HANDOVER_S,
    BridgeConflict,
    WeightBridge,
    bridge_at_start,
)
from tests.unit.vllm.fake_engine import FakeEngine, Record

NEXT, LATER = PolicyVersion(1, 0), PolicyVersion(2, 0)
LEASE_S = 60.0
SERVED_BEFORE = PolicyVersion(2, 7)
DEADLINE_S = 300.0


async def attached(engine: FakeEngine) -> tuple[WeightBridge, str]:
    """The bridge, and the session of a trainer."""
    bridge = WeightBridge(EngineControl(engine))
    return bridge, await bridge.open_session()


async def paused(engine: FakeEngine) -> tuple[WeightBridge, str]:
    """As `attached`, with a trainer that holds the pause."""
    bridge, session = await attached(engine)
    await bridge.pause(session, LEASE_S, NEXT)
    assert bridge.paused
    return bridge, session


SLOW = FakeEngine(max_tokens=[8], hangs={"finish and pause"})


@pytest.mark.parametrize(
    ("engine", "stamps_versions", "expected"),
    [
        # A pause finishes requests only if all are short and do not take long.
        (FakeEngine(max_tokens=[]), True, ["finish and pause"]),
        (FakeEngine(max_tokens=[8, 16]), True, ["finish and pause"]),
        (FakeEngine(max_tokens=[8, 17]), True, ["pause"]),
        (FakeEngine(max_tokens=[8, None]), True, ["pause"]),
        (SLOW, True, ["finish and pause", "pause"]),
        # vLLM before 0.32 stamps no versions, and pauses by itself.
        (FakeEngine(max_tokens=[8]), False, ["pause_generation keep True"]),
    ],
)
async def test_how_an_engine_is_paused(
    engine: FakeEngine, stamps_versions: bool, expected: list[str]
) -> None:
    control = EngineControl(engine, finished_first_tokens=16, stamps_versions=stamps_versions)
    await control.pause()
    assert engine.calls == expected


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


async def test_weights_are_loaded_under_a_pause_and_named_before_it_ends() -> None:
    engine = FakeEngine()
    bridge = WeightBridge(EngineControl(engine))
    await bridge.update(Path("/weights/1-5"), PolicyVersion(1, 5))
    assert engine.calls == [
        *("pause", "start_weight_update", "update_weights", "finish_weight_update"),
        *("name 1.5", "resume"),
    ]
    assert bridge.version == PolicyVersion(1, 5)


@pytest.mark.parametrize("fails", [True, False])
async def test_an_engine_that_fails_or_hangs_while_it_loads_never_resumes(fails: bool) -> None:
    names = {"update_weights"}
    engine = FakeEngine(fails=names) if fails else FakeEngine(hangs=names)
    bridge = WeightBridge(EngineControl(engine))
    with pytest.raises((RuntimeError, EngineTimeout)):
        await bridge.update(Path("/weights/1-5"), PolicyVersion(1, 5))
    assert bridge.engine.broken
    assert engine.calls == ["pause", "start_weight_update", "update_weights"]


async def test_an_engine_that_does_not_pause_is_told_to_go_on() -> None:
    engine = FakeEngine(hangs={"pause"})
    bridge, session = await attached(engine)
    with pytest.raises(EngineTimeout, match="did not pause"):
        await bridge.pause(session, LEASE_S, NEXT)
    assert engine.calls == ["pause", "resume"]
    assert not bridge.paused
    assert not bridge.engine.broken


async def test_a_trainer_that_leaves_while_its_pause_is_carried_out_leaves_nothing_paused() -> None:
    at_rest = asyncio.Event()
    engine = FakeEngine(held={"pause": at_rest})
    bridge, session = await attached(engine)
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
    """Asking again extends it."""
    bridge, session = await paused(FakeEngine())
    await asyncio.sleep(LEASE_S - 1.0)
    await bridge.pause(session, LEASE_S, NEXT)
    await asyncio.sleep(LEASE_S - 1.0)
    assert bridge.paused
    await asyncio.sleep(2.0)
    assert not bridge.paused
    assert not bridge.weights_intact
    second = await bridge.open_session()
    await bridge.pause(second, LEASE_S, LATER)
    await bridge.resume(second, written=True)
    assert bridge.weights_intact


@pytest.mark.parametrize("stage", ["idle", "asking", "writing"])
@pytest.mark.parametrize("call", ["pause", "resume", "close"])
async def test_after_a_late_write_the_other_trainer_writes_everything_again(
    call: str, stage: str
) -> None:
    """The first trainer was stopped in the middle of a write, for longer than its lease. When it
    goes on, a second one has written all weights; it is idle, or publishes the next ones."""
    bridge, late = await paused(FakeEngine())
    await asyncio.sleep(LEASE_S + 1.0)
    hung_up = asyncio.Event()
    second = await bridge.open_session(hung_up.set)
    await bridge.pause(second, LEASE_S, LATER)
    await bridge.resume(second, written=True)
    assert bridge.state is EngineState.SERVING
    if stage != "idle":
        await bridge.pause(second, LEASE_S, PolicyVersion(3, 0), writing=stage == "writing")

    if call == "close":
        await bridge.close_session(late)
    else:
        asking = (
            bridge.pause(late, LEASE_S, PolicyVersion(4, 0))
            if call == "pause"
            else bridge.resume(late, written=True)
        )
        with pytest.raises(BridgeConflict, match="does not hold the pause"):
            await asking

    if stage == "idle":
        assert hung_up.is_set()
    else:
        with pytest.raises(BridgeConflict, match="does not hold the pause"):
            await bridge.resume(second, written=True)
    await bridge.close_session(second)
    await asyncio.sleep(1.0)  # virtual time: until its pause has ended
    assert (bridge.state, bridge.weights_intact) == (EngineState.AWAITING_WEIGHTS, False)
    await write_back(bridge, PolicyVersion(5, 0))
    assert bridge.state is EngineState.SERVING


async def test_a_lease_that_runs_out_while_the_version_is_named_leaves_no_doubt_behind() -> None:
    named = asyncio.Event()
    bridge, session = await attached(FakeEngine(held={"name 1.0": named}))
    await bridge.pause(session, LEASE_S, NEXT)
    await asyncio.sleep(LEASE_S - 1.0)
    resuming = asyncio.create_task(bridge.resume(session, written=True))
    await asyncio.sleep(2.0)
    named.set()
    await resuming
    await bridge.pause(session, LEASE_S, LATER)
    await bridge.resume(session, written=True)
    assert (bridge.state, bridge.version) == (EngineState.SERVING, LATER)


async def test_a_pause_without_a_write_leaves_no_doubt_behind() -> None:
    bridge, session = await attached(FakeEngine())
    await bridge.pause(session, LEASE_S, NEXT, writing=False)
    await asyncio.sleep(LEASE_S + 1.0)
    with pytest.raises(BridgeConflict, match="is not attached"):
        await bridge.pause(session, LEASE_S, NEXT)
    assert (bridge.state, bridge.weights_intact) == (EngineState.SERVING, True)


@pytest.mark.parametrize("writing", [False, True])
@pytest.mark.parametrize("ends", ["lease", "connection"])
async def test_nothing_is_sampled_from_weights_that_were_half_written(
    ends: str, writing: bool
) -> None:
    """A pause in which no write had begun is undone at once."""
    engine, given_up = FakeEngine(), asyncio.Event()
    bridge, session = await attached(engine)
    bridge.write_back.on_overdue = given_up.set
    await bridge.pause(session, LEASE_S, NEXT, writing=False)
    if writing:
        await bridge.pause(session, LEASE_S, NEXT)
        await bridge.pause(session, LEASE_S, NEXT, writing=False)
    if ends == "lease":
        await asyncio.sleep(LEASE_S + 1.0)
    else:
        await bridge.close_session(session)
    assert engine.calls == ["pause"] if writing else ["pause", "resume"]
    assert bridge.weights_intact is not writing
    assert bridge.version == PolicyVersion(0, 0)
    refusal = bridge.refusal()
    if not writing:
        assert refusal is None
        return
    assert refusal is not None
    assert refusal.hold
    assert "of which a trainer may have written only a part" in refusal.reason
    await given_up.wait()
    assert bridge.state is EngineState.FAILED
    given_up.clear()
    await bridge.pause(another := await bridge.open_session(), LEASE_S, NEXT)
    await bridge.close_session(another)
    assert given_up.is_set(), "requests that were spared while it wrote"
    await write_back(bridge, NEXT)
    assert engine.calls[-2:] == ["name 1.0", "resume"]
    assert (bridge.refusal(), bridge.weights_intact) == (None, True)


async def test_a_server_that_awaits_no_weights_starts_again_with_its_model() -> None:
    bridge = WeightBridge(EngineControl(FakeEngine()), write_back_deadline_s=None)
    session = await bridge.open_session()
    await bridge.pause(session, LEASE_S, NEXT)
    await bridge.close_session(session)
    assert bridge.engine.broken


async def test_a_pause_that_ended_in_time_leaves_no_lease_behind() -> None:
    bridge, session = await paused(FakeEngine())
    await bridge.resume(session, written=True)
    await asyncio.sleep(2 * LEASE_S)
    await bridge.pause(session, LEASE_S, LATER)  # by the trainer that is still attached
    await bridge.resume(session, written=True)
    assert bridge.version == LATER
    assert bridge.weights_intact


async def test_of_two_trainers_that_wait_one_is_let_in() -> None:
    bridge, first = await attached(FakeEngine())
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
    assert bridge.state is EngineState.SLEEPING
    assert refusal is not None
    assert not refusal.hold
    assert "/bridge/wake_up" in refusal.reason
    await bridge.engine.wake_up()
    assert bridge.refusal() is None


@pytest.fixture
def record() -> Record:
    return Record()


IN_MEMORY = WeightRef(version=SERVED_BEFORE, kind=WeightKind.MEMORY)


async def started(last: WeightRef, record: Record, *flags: str) -> WeightBridge:
    """The bridge of an engine that starts when the run has served `last`."""
    settings = load_settings(ServerSettings, ["--model", "m", "--share-weights", *flags])
    return await bridge_at_start(EngineControl(FakeEngine()), settings, last, record)


@pytest.fixture
async def restarted(record: Record) -> WeightBridge:
    return await started(IN_MEMORY, record)


@pytest.mark.parametrize(
    ("last", "flags", "version"),
    [
        (WeightRef(), (), (0, 0)),
        (WeightRef(version=PolicyVersion(3, 0)), (), (3, 0)),  # a name that no trainer made
        # A trainer's versions stay in its epoch, and torn weights raise the epoch by at most one.
        (IN_MEMORY, ("--no-await-weights",), (3, 0)),
    ],
)
async def test_an_engine_serves_the_model_if_nothing_was_trained_or_it_is_told_to(
    last: WeightRef, flags: tuple[str, ...], version: tuple[int, int], record: Record
) -> None:
    bridge = await started(last, record, *flags)
    assert (bridge.version, bridge.refusal()) == (version, None)
    saved = [ServedWeights(WeightRef(version=PolicyVersion(3, 0)))] if flags else []
    assert record.saved == saved


async def test_a_wait_for_weights_is_normal_when_a_run_is_resumed(record: Record) -> None:
    with capture_logs() as logs:
        await started(IN_MEMORY, record)
    (line,) = (line for line in logs if line["event"] == "wait_for_write_back.started")
    assert line["log_level"] == "info"


async def write_back(bridge: WeightBridge, version: PolicyVersion) -> None:
    session = await bridge.open_session()
    await bridge.pause(session, LEASE_S, version)
    await bridge.resume(session, written=True)
    await bridge.close_session(session)


@pytest.mark.parametrize("version", [SERVED_BEFORE, PolicyVersion(2, 8), PolicyVersion(3, 0)])
async def test_it_serves_once_the_same_or_later_weights_are_back(
    restarted: WeightBridge, record: Record, version: PolicyVersion
) -> None:
    refusal = restarted.refusal()
    assert restarted.state is EngineState.AWAITING_WEIGHTS
    assert refusal is not None
    assert refusal.hold
    assert "[2, 7]" in refusal.reason
    await write_back(restarted, version)
    await asyncio.sleep(2 * DEADLINE_S)
    assert restarted.refusal() is None
    assert restarted.state is EngineState.SERVING
    assert restarted.version == version
    assert record.saved == [ServedWeights(WeightRef(version=version, kind=WeightKind.MEMORY))]


async def test_older_weights_are_refused_and_the_same_ones_when_they_are_back(
    restarted: WeightBridge,
) -> None:
    session = await restarted.open_session()
    with pytest.raises(BridgeConflict, match="is not newer than"):
        await restarted.pause(session, LEASE_S, PolicyVersion(2, 6))
    await restarted.close_session(session)
    await write_back(restarted, SERVED_BEFORE)
    with pytest.raises(BridgeConflict, match="is not newer than"):
        await write_back(restarted, SERVED_BEFORE)


@pytest.mark.parametrize("cut_off", [False, True])
async def test_a_trainer_that_did_not_write_everything_back_may_try_again(
    restarted: WeightBridge, record: Record, cut_off: bool
) -> None:
    session = await restarted.open_session()
    await restarted.pause(session, LEASE_S, SERVED_BEFORE)
    if not cut_off:
        await restarted.resume(session, written=False)
    await restarted.close_session(session)
    assert restarted.state is EngineState.AWAITING_WEIGHTS
    assert not restarted.paused
    assert restarted.weights_intact is not cut_off
    assert record.saved == []  # no request is answered with them, so they need no new version
    await write_back(restarted, SERVED_BEFORE)
    assert restarted.weights_intact
    assert restarted.refusal() is None


async def test_beyond_the_deadline_requests_are_refused_at_once_until_a_trainer_comes(
    restarted: WeightBridge,
) -> None:
    await restarted.write_back.wait(2 * DEADLINE_S)
    assert asyncio.get_running_loop().time() == pytest.approx(DEADLINE_S), "held requests wake"
    refusal = restarted.refusal()
    assert restarted.state is EngineState.FAILED
    assert refusal is not None
    assert not refusal.hold
    assert "Start the trainer again" in refusal.reason
    await write_back(restarted, SERVED_BEFORE)
    assert restarted.state is EngineState.SERVING
