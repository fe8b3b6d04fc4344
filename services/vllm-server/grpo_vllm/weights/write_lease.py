"""Controls when a trainer may write the weights in place, and which policy version is served.

`WeightBridge` owns pause, version and resume. One trainer at a time is attached; its session is its
open connection to the weight socket. A pause has a lease. It ends when the trainer resumes, when
the lease expires or when the connection closes. If the trainer had not begun to write, nothing has
changed. Otherwise the weights may be torn: `weights_intact` is False, and the engine samples
nothing until a trainer has written everything again.

An engine that starts during a run holds the checkpoint's weights and answers no request with them
either. First a trainer writes back the version that was served last, or a later one. After a
deadline, requests are refused at once, but a trainer can still write the weights back.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from grpo_core.errors import GrpoError
from grpo_core.tree.server import ServerSettings
from grpo_core.weights.ref import UNTRAINED, WeightKind, WeightRef
from grpo_core.weights.servers import EngineState
from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.engine.control import EngineControl
from grpo_vllm.middleware import GateRefusal
from grpo_vllm.weights.served_store import ServedStore, ServedWeights

log = structlog.get_logger()


_CLOSED_BECAUSE = {
    EngineState.AWAITING_WEIGHTS: "the engine {cause}; waiting for a trainer to write policy "
    "version {version} back",
    EngineState.FAILED: "the engine {cause}, and no trainer wrote policy version {version} back "
    "in time. Start the trainer again; or restart this server with --no-await-weights or another "
    "--run-id to serve --model",
    EngineState.SLEEPING: "the engine is sleeping; end the sleep with POST /bridge/wake_up",
}


class WriteBack:
    """Tracks whether a trainer still has to write weights back. Needs a running event loop."""

    def __init__(self) -> None:
        self.missing = False
        self.overdue = False
        self.cause = ""
        self.on_overdue: Callable[[], None] = lambda: None
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, version: PolicyVersion, deadline_s: float, cause: str) -> None:
        """Record that the weights of `version` are missing. A trainer has `deadline_s` seconds to
        write them back."""
        self.missing, self.cause = True, cause
        self._changed.clear()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(deadline_s, self._give_up, deadline_s)
        log.info(
            "wait_for_write_back.started",
            policy_version=tuple(version),
            deadline_s=deadline_s,
            reason=cause,
        )

    def done(self) -> None:
        """Record that a trainer has written all weights."""
        if not self.missing:
            return
        assert self._timer is not None
        self._timer.cancel()
        log.info("write_back.completed", deadline_exceeded=self.overdue)
        self.missing = self.overdue = False
        self._changed.set()

    async def wait(self, at_most_s: float) -> None:
        """Return when the weights are written back or overdue, or after `at_most_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at_most_s):
                await self._changed.wait()

    def _give_up(self, deadline_s: float) -> None:
        self.overdue = True
        self._changed.set()
        self.on_overdue()
        log.error(
            "write_back.overdue",
            deadline_s=deadline_s,
            effect="requests are answered with status 503",
            hint="start the trainer again, so that it writes the weights back; or restart this "
            "server with --no-await-weights or another --run-id to serve --model",
        )


HANDOVER_S = 2.0
"""Seconds that a new trainer waits for the previous trainer's connection to close."""


class BridgeConflict(GrpoError):
    """The session may not do this: it is unknown, does not hold the pause, or its lease expired."""


_RESTARTED = "restarted and holds the weights of --model"
_HALF_WRITTEN = "holds weights of which a trainer may have written only a part"
_LATE = "an earlier trainer went on writing after its lease had expired"
_NO_PAUSE = "session {session} does not hold the pause: its lease expired; attach and write again"


@dataclass
class _Pause:
    """The current lease. `version`: names the weights that its session writes, and `writing`: has
    begun to write."""

    session: str
    version: PolicyVersion
    timer: asyncio.TimerHandle
    writing: bool


class WeightBridge:
    """Args:
    engine: the engine to pause and resume
    version: names the engine's first weights, or those that a trainer must write back
    store: records every version before requests are answered with it
    write_back_deadline_s: for a trainer to write weights back; None: the server serves --model
        again instead, with a new engine
    """

    def __init__(
        self,
        engine: EngineControl,
        version: PolicyVersion = UNTRAINED,
        store: ServedStore | None = None,
        write_back_deadline_s: float | None = 300.0,
    ) -> None:
        self.engine = engine
        self._write_back_deadline_s = write_back_deadline_s
        self.write_back = WriteBack()
        self.version = version
        self.weights_intact = True
        self.update_count = 0
        self.last_update_time: float | None = None
        self.notice_count = 0
        self._store = store or ServedStore()
        self._session: str | None = None
        self._late: set[str] = set()
        """Sessions whose lease ran out while they wrote, and which may not know it yet."""
        self._hang_up: Callable[[], None] = lambda: None
        self._session_ended = asyncio.Event()
        self._session_ended.set()
        self._pause: _Pause | None = None
        self._at_rest = False
        """The engine is paused."""
        self._background: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()

    @property
    def paused(self) -> bool:
        return self._pause is not None

    @property
    def state(self) -> EngineState:
        if self.write_back.missing:
            overdue = self.write_back.overdue
            return EngineState.FAILED if overdue else EngineState.AWAITING_WEIGHTS
        if self.engine.sleeping:
            return EngineState.SLEEPING
        return EngineState.PAUSED if self.paused else EngineState.SERVING

    def refusal(self) -> GateRefusal | None:
        """The reason why requests may not pass now; None if they may, or wait for the end of a
        pause, which comes soon."""
        state = self.state
        reason = _CLOSED_BECAUSE.get(state)
        if reason is None:
            return None
        hold = state is EngineState.AWAITING_WEIGHTS
        cause = self.write_back.cause
        return GateRefusal(reason.format(version=list(self.version), cause=cause), hold)

    async def open_session(self, hang_up: Callable[[], None] = lambda: None) -> str:
        """Attach a trainer. Raises `BridgeConflict` if another trainer stays attached.

        Args: hang_up: ends its connection, so that it attaches again and writes all weights
        """
        try:
            async with asyncio.timeout(HANDOVER_S):
                while not self._session_ended.is_set():  # the event wakes all waiting trainers
                    await self._session_ended.wait()
        except TimeoutError:
            raise BridgeConflict("another trainer is attached; run one per server") from None
        self._session_ended.clear()
        self._session, self._hang_up = uuid.uuid4().hex, hang_up
        log.info("trainer.attached", session=self._session)
        return self._session

    async def close_session(self, session: str) -> None:
        """Detach the trainer whose connection closed."""
        if session in self._late:
            async with self._lock:
                await self._note_late_writer(session)
        if self._session != session:
            return
        log.info("trainer.detached", session=session)
        self._session = None
        await self._detach(self._pause, "the trainer's connection closed")

    async def pause(
        self, session: str, lease_s: float, version: PolicyVersion, writing: bool = True
    ) -> None:
        """Stop sampling, as `EngineControl.pause` does.

        `version` names the weights that the session will write; `writing`: it begins to write them.
        A second call extends the lease.

        Raises:
            BridgeConflict: the session is unknown, or the version is not new.
            EngineTimeout: the engine did not pause in time.
        """
        async with self._lock:
            if await self._note_late_writer(session):
                raise BridgeConflict(_NO_PAUSE.format(session=session))
            self._check_is_attached(session)
            # A write-back may reuse the version: no request was answered with other weights.
            is_free = version > self.version or (
                self.write_back.missing and version == self.version
            )
            if not is_free:
                raise BridgeConflict(
                    f"policy version {tuple(version)} is not newer than the served version "
                    f"{tuple(self.version)}; give new weights a newer version"
                )
            if not self._at_rest:
                await self.engine.pause()
                try:
                    self._check_is_attached(session)
                except BridgeConflict:  # it detached meanwhile, when there was no pause to end
                    await self.engine.resume()
                    raise
                self._at_rest = True
            elif self._pause is not None:
                self._pause.timer.cancel()
                writing |= self._pause.writing
            loop = asyncio.get_running_loop()
            timer = loop.call_later(lease_s, self._end_lease, session, "the lease expired")
            self._pause = _Pause(session, version, timer, writing)

    async def resume(self, session: str, written: bool) -> None:
        """Sample again: with the version named at the pause or, if nothing was written, with the
        previous one.

        Raises:
            BridgeConflict: the session does not hold the pause.
            EngineTimeout: the engine did not resume in time; it then ends.
        """
        async with self._lock:
            is_late = await self._note_late_writer(session)
            if is_late or self._pause is None or self._pause.session != session:
                raise BridgeConflict(_NO_PAUSE.format(session=session))
            self._pause.timer.cancel()
            if written:
                await self._name(self._pause.version)
            await self._end_pause(self._pause)
            if written:
                self.write_back.done()

    async def adopt(self, version: PolicyVersion) -> None:
        """Serve a new version that was not written in place, because an adapter was switched."""
        async with self._lock:
            await self._name(version)

    async def update(self, directory: Path, version: PolicyVersion) -> float:
        """Load all weights from the directory. Returns the seconds during which the engine was
        paused. If loading fails, the engine ends."""
        async with self._lock:
            began = time.monotonic()
            await self.engine.update_weights(directory, version)
            pause_s = time.monotonic() - began
            self._note(version)
            return pause_s

    async def take_notice(self) -> bool:
        """Clear the KV cache after an update notice. The version stays, because only a trainer that
        holds the pause can set it. Returns False if requests in flight still use the cache."""
        self.notice_count += 1
        reset = await self.engine.reset_prefix_cache()
        log.info(
            "update_notice.received",
            route="/bridge/notify_update",
            notice_count=self.notice_count,
            prefix_cache_reset=reset,
        )
        return reset

    async def _note_late_writer(self, session: str) -> bool:
        """True if the lease of the session ran out while it wrote. It may have written until now,
        into weights that another one writes or has written: that one must write all again."""
        if session not in self._late:
            return False
        self._late.discard(session)
        if self._pause is None and self.weights_intact:
            await self.engine.pause()
            self._at_rest = True
            log.warning("weights.torn", reason=_LATE)
            await self._note_torn()
            if self._session is not None:
                self._hang_up()
        elif self._pause is not None and self._pause.session != session:
            self._pause.writing = True
            self._end_lease(self._pause.session, _LATE)
        return True

    def _check_is_attached(self, session: str) -> None:
        if session != self._session:
            raise BridgeConflict(
                f"session {session} is not attached to this server (the server restarted, or the "
                "lease expired); connect to the weight socket again"
            )

    async def _name(self, version: PolicyVersion) -> None:
        await self.engine.name_weights(version)
        self._note(version)
        written = WeightRef(version=version, kind=WeightKind.MEMORY)
        await self._store.save(ServedWeights(written))

    def _note(self, version: PolicyVersion) -> None:
        self.version = version
        self.weights_intact = True
        self.update_count += 1
        self.last_update_time = time.time()

    def _end_lease(self, session: str, why: str) -> None:
        # The session ends too: a trainer that only hung must attach again.
        if self._session == session:
            self._session = None
            if self._pause is not None and self._pause.writing:
                self._late.add(session)
        task = asyncio.create_task(self._detach(self._pause, why))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _detach(self, pause: _Pause | None, why: str) -> None:
        """End the pause of a session that will not resume, and serve again."""
        try:
            async with self._lock:
                if pause is not None and self._pause is pause:
                    facts = {"writing": pause.writing, "policy_version": tuple(self.version)}
                    log.warning("pause.abandoned", reason=why, **facts)
                    if pause.writing:
                        await self._note_torn()
                    await self._end_pause(pause)
        finally:
            # Only now may another trainer attach, because it must see the new version. If the lease
            # expires while the connection closes, the second call may find a new session.
            if self._session is None:
                self._session_ended.set()

    async def _note_torn(self) -> None:
        """Let the engine sample nothing until a trainer has written all weights."""
        self.weights_intact = False
        if self.write_back.missing:  # it is waited for already
            if self.write_back.overdue:
                self.write_back.on_overdue()
            return
        if self._write_back_deadline_s is None:
            self.engine.broken = True  # the next engine loads --model
            return
        written = WeightRef(version=self.version, kind=WeightKind.MEMORY)
        await self._store.save(ServedWeights(written, intact=False))
        self.write_back.begin(self.version, self._write_back_deadline_s, _HALF_WRITTEN)

    async def _end_pause(self, pause: _Pause) -> None:
        """The engine stays at rest while it does not hold the run's weights."""
        pause.timer.cancel()
        if self.weights_intact:
            await self.engine.resume()
            self._at_rest = False
        self._pause = None


async def bridge_at_start(
    engine: EngineControl, settings: ServerSettings, last: WeightRef, store: ServedStore
) -> WeightBridge:
    """The bridge of an engine that has just started. `last`: the weights that the run served last.
    The engine does not hold those that a trainer wrote in place."""
    version, is_lost = last.version, settings.share_weights and last.trained
    if is_lost and not settings.await_weights:
        # The run returns to the checkpoint, so the version must be one that no trainer has used.
        version = version.next_epoch()
    deadline_s = settings.write_back_deadline_s if settings.await_weights else None
    bridge = WeightBridge(engine, version, store, deadline_s)
    await engine.name_weights(version)
    if is_lost and deadline_s is not None:
        bridge.write_back.begin(version, deadline_s, _RESTARTED)
    elif is_lost:
        await store.save(ServedWeights(WeightRef(version=version)))
    return bridge
