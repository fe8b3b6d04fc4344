"""Lease for writing the weights in place, and the version that is served.

One object owns pause, version and resume. One trainer at a time is attached; its session is its
open connection to the weight socket. A pause is a lease that this session holds. It ends when the
trainer resumes, when the lease runs out, or when the connection closes, whichever comes first, so
a trainer that dies or hangs in the middle of a write never leaves the server silent. What it
leaves in memory may then be half an update: the server says so (`weights_intact`) until a trainer
has written everything again.

An engine that starts in the middle of a run holds the checkpoint's weights. No request is answered
from them: a trainer first writes back the version that was served last, or a later one. After a
deadline requests are refused at once, and a trainer may still come.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass

import structlog

from grpo_core.errors import GrpoError
from grpo_core.weights.ref import UNTRAINED, WeightKind, WeightRef
from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.engine.engine_client import EngineControl
from grpo_vllm.http.readiness_gate import Refusal, ServingState, refusal_in
from grpo_vllm.weights.served_store import ServedStore, ServedWeights

log = structlog.get_logger()


class WriteBack:
    """Nothing is missing until `begin`. Lives on the running event loop."""

    def __init__(self) -> None:
        self.missing = False
        self.overdue = False
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, version: PolicyVersion, deadline_s: float) -> None:
        """The weights of `version` are missing; a trainer has `deadline_s` seconds."""
        self.missing = True
        self._timer = asyncio.get_running_loop().call_later(deadline_s, self._give_up, deadline_s)
        log.warning(
            "this run was served other weights than the checkpoint's; waiting for a trainer to "
            "write them back",
            policy_version=tuple(version),
            deadline_s=deadline_s,
        )

    def done(self) -> None:
        """A trainer has written everything."""
        if not self.missing:
            return
        log.info("the weights are back; serving", after_deadline=self.overdue)
        self.missing = self.overdue = False
        if self._timer is not None:
            self._timer.cancel()
        self._changed.set()

    async def wait(self, at_most_s: float) -> None:
        """Until the weights are back or overdue, and no longer than `at_most_s` seconds."""
        try:
            async with asyncio.timeout(at_most_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def _give_up(self, deadline_s: float) -> None:
        self.overdue = True
        self._changed.set()
        log.error(
            "no trainer has written the weights back; requests are refused",
            deadline_s=deadline_s,
            next="start the trainer again, or this server with another --run-id or with "
            "--no-await-weights to serve the checkpoint",
        )


HANDOVER_S = 2.0
"""How long a new trainer waits for the previous one's connection to close."""


class BridgeConflict(GrpoError):
    """The session may not do this now: unknown, not the holder, or its lease is over."""


@dataclass
class _Pause:
    """The lease that is running."""

    session: str
    version: PolicyVersion
    timer: asyncio.TimerHandle


class WeightBridge:
    """Args:
    engine: what is paused, named and resumed
    version: names the weights that the engine starts with, or those that it should hold
    store: learns every name before anybody is answered under it
    """

    def __init__(
        self,
        engine: EngineControl,
        version: PolicyVersion = UNTRAINED,
        store: ServedStore | None = None,
    ) -> None:
        self.engine = engine
        self.write_back = WriteBack()
        self.version = version
        self.weights_intact = True
        self.update_count = 0
        self.last_update_time: float | None = None
        self.notice_count = 0
        self._store = store or ServedStore()
        self._session: str | None = None
        self._session_ended = asyncio.Event()
        self._session_ended.set()
        self._pause: _Pause | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()

    @property
    def paused(self) -> bool:
        return self._pause is not None

    @property
    def state(self) -> ServingState:
        if self.write_back.missing:
            overdue = self.write_back.overdue
            return ServingState.FAILED if overdue else ServingState.AWAITING_WEIGHTS
        if self.engine.sleeping:
            return ServingState.SLEEPING
        return ServingState.PAUSED if self.paused else ServingState.SERVING

    def refusal(self) -> Refusal | None:
        """Why requests may not pass now; None while they may."""
        return refusal_in(self.state, self.version)

    async def open_session(self) -> str:
        """Attach a trainer.

        Raises:
            BridgeConflict: another one is attached and does not leave.
        """
        try:
            async with asyncio.timeout(HANDOVER_S):
                while not self._session_ended.is_set():  # it wakes every trainer that waits
                    await self._session_ended.wait()
        except TimeoutError:
            raise BridgeConflict(
                "another trainer is attached to this server; run one trainer per server"
            ) from None
        self._session_ended.clear()
        self._session = uuid.uuid4().hex
        log.info("trainer attached", session=self._session)
        return self._session

    async def close_session(self, session: str) -> None:
        """The trainer's connection is gone."""
        if self._session != session:
            return
        log.info("trainer detached", session=session)
        self._session = None
        await self._detach(self._pause, "the trainer's connection closed")

    async def pause(self, session: str, lease_s: float, version: PolicyVersion) -> None:
        """Stop scheduling; keep requests in flight and recompute their KV cache afterwards.

        `version` will name what the session writes. Asking again extends the lease.

        Raises:
            BridgeConflict: unknown session, or a version that is not a new one.
            EngineTimeout: the engine did not come to rest.
        """
        async with self._lock:
            self._check_is_attached(session)
            self._check_is_free(version)
            if self._pause is None:
                await self._pause_engine(session)
            else:
                self._pause.timer.cancel()
            loop = asyncio.get_running_loop()
            timer = loop.call_later(lease_s, self._lease_ran_out, session)
            self._pause = _Pause(session, version, timer)

    async def resume(self, session: str, written: bool) -> None:
        """Serve again: under the version named at the pause, or, where nothing was written, under
        the one before.

        Raises:
            BridgeConflict: the session does not hold the pause.
            EngineTimeout: the engine did not start again; the server ends.
        """
        async with self._lock:
            if self._pause is None or self._pause.session != session:
                raise BridgeConflict(
                    f"session {session} does not hold the pause: its lease ran out, and the "
                    "server went on; attach again and write everything under a new pause"
                )
            if written:
                await self._name(self._pause.version, intact=True)
            await self._end_pause(self._pause)
            if written:
                self.write_back.done()

    async def adopt(self, version: PolicyVersion) -> None:
        """Name what is served from now on, where nobody writes in place: an adapter took over."""
        async with self._lock:
            await self._name(version, intact=True)

    async def take_notice(self) -> bool:
        """Something outside says that weights have changed: forget cached keys and values. The
        version stays, since only a trainer that holds the pause can name weights.

        Returns:
            False where requests under way still use the cache.
        """
        self.notice_count += 1
        reset = await self.engine.reset_prefix_cache()
        log.info("update notice", notice_count=self.notice_count, prefix_cache_reset=reset)
        return reset

    def _check_is_attached(self, session: str) -> None:
        if session != self._session:
            raise BridgeConflict(
                f"session {session} is not attached to this server (it may have restarted, or "
                "a lease ran out); connect to the weight socket again"
            )

    async def _pause_engine(self, session: str) -> None:
        await self.engine.pause()
        try:
            self._check_is_attached(session)
        except BridgeConflict:  # it left meanwhile, and had no pause yet that its end would end
            await self.engine.resume()
            raise

    def _check_is_free(self, version: PolicyVersion) -> None:
        # Weights that are written back keep their name: nobody was answered from others under it.
        taken = version < self.version if self.write_back.missing else version <= self.version
        if taken:
            raise BridgeConflict(
                f"policy version {tuple(version)} is not newer than {tuple(self.version)}; "
                "a version names one set of weights only"
            )

    async def _abandon(self, pause: _Pause | None, why: str) -> None:
        """Go on serving after a holder that will not resume."""
        async with self._lock:
            if pause is None or self._pause is not pause:
                return
            if self.write_back.missing:
                self.weights_intact = False  # no name is needed: nobody is answered from these
            else:
                # The write may have been cut in half: what is served now must carry neither the
                # name of the weights before nor one that the trainer will use.
                torn = PolicyVersion(self.version.epoch + 1, self.version.step)
                await self._name(torn, intact=False)
            log.warning(
                "pause abandoned",
                why=why,
                state=self.state.value,
                policy_version=tuple(self.version),
            )
            await self._end_pause(pause)

    async def _name(self, version: PolicyVersion, intact: bool) -> None:
        await self.engine.name_weights(version)
        self.version = version
        self.weights_intact = intact
        self.update_count += 1
        self.last_update_time = time.time()
        written = WeightRef(version=version, kind=WeightKind.MEMORY)
        await self._store.save(ServedWeights(written, intact))

    def _lease_ran_out(self, session: str) -> None:
        # The session is over as well: should the trainer wake up, it must attach anew.
        if self._session == session:
            self._session = None
        task = asyncio.create_task(self._detach(self._pause, "its lease ran out"))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _detach(self, pause: _Pause | None, why: str) -> None:
        try:
            await self._abandon(pause, why)
        finally:
            # Not before: a newcomer must see what these weights are called now. A lease may run out
            # while its connection closes: the later of the two may find another trainer attached.
            if self._session is None:
                self._session_ended.set()

    async def _end_pause(self, pause: _Pause) -> None:
        pause.timer.cancel()
        await self.engine.resume()
        self._pause = None
