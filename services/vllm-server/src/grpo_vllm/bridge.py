"""Who may write the weights, when, and which version is served.

One object owns pause, version and resume. One trainer at a time is attached; its session is its
open connection to the weight socket. A pause is a lease that this session holds. It ends when the
trainer resumes, when the lease runs out, or when the connection closes, whichever comes first, so
a trainer that dies or hangs in the middle of a write never leaves the server silent. What it
leaves in memory may then be half an update: the server says so (`weights_intact`) until a trainer
has written everything again.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from typing import Protocol

import structlog

from grpo_core.errors import GrpoError
from grpo_core.wire import PolicyVersion

log = structlog.get_logger()

ENGINE_CALL_TIMEOUT_S = 30.0
HANDOVER_S = 2.0
"""How long a new trainer waits at the door for the connection of the one before to close."""


class BridgeConflict(GrpoError):
    """The session may not do this now: unknown, not the holder, or its lease is over."""


class BridgeTimeout(GrpoError):
    """The engine did not stop or start scheduling in time."""


class PausableEngine(Protocol):
    async def pause(self) -> None:
        """Stop scheduling, keep requests in flight, forget all keys and values."""

    async def resume(self) -> None: ...

    async def name_weights(self, version: PolicyVersion) -> None:
        """Stamp what is sampled from now on."""


@dataclass
class _Pause:
    """The lease that is running."""

    session: str
    version: PolicyVersion
    timer: asyncio.TimerHandle


class WeightBridge:
    """Args: engine: what is paused, named and resumed."""

    def __init__(self, engine: PausableEngine) -> None:
        self.version = PolicyVersion(epoch=0, step=0)
        self.weights_intact = True
        self.update_count = 0
        self.last_update_time: float | None = None
        self.broken = asyncio.Event()
        """Set once the engine cannot be brought to serve again: the process must end."""
        self._engine = engine
        self._session: str | None = None
        self._session_ended = asyncio.Event()
        self._session_ended.set()
        self._pause: _Pause | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()

    @property
    def paused(self) -> bool:
        return self._pause is not None

    async def open_session(self) -> str:
        """Attach a trainer.

        Raises:
            BridgeConflict: another one is attached and does not leave.
        """
        try:
            async with asyncio.timeout(HANDOVER_S):
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
        try:
            await self._abandon(self._pause, "the trainer's connection closed")
        finally:
            self._session_ended.set()

    async def pause(self, session: str, lease_s: float, version: PolicyVersion) -> None:
        """Stop scheduling; keep requests in flight and recompute their KV cache afterwards.

        `version` will name what the session writes. Asking again extends the lease.

        Raises:
            BridgeConflict: unknown session, or a version that is not a new one.
            BridgeTimeout: the engine did not come to rest.
        """
        async with self._lock:
            if session != self._session:
                raise BridgeConflict(
                    f"session {session} is not attached to this server (it may have restarted, or "
                    "a lease ran out); connect to the weight socket again"
                )
            if version <= self.version:
                raise BridgeConflict(
                    f"policy version {tuple(version)} is not newer than {tuple(self.version)}; "
                    "a version names one set of weights only"
                )
            if self._pause is None:
                await self._engine_pause()
            else:
                self._pause.timer.cancel()
            loop = asyncio.get_running_loop()
            pause = _Pause(session, version, loop.call_later(lease_s, self._lease_ran_out))
            self._pause = pause

    async def resume(self, session: str, written: bool) -> None:
        """Serve again: under the version named at the pause, or, where nothing was written, under
        the one before.

        Raises:
            BridgeConflict: the session does not hold the pause.
            BridgeTimeout: the engine did not start again; the server ends.
        """
        async with self._lock:
            if self._pause is None or self._pause.session != session:
                raise BridgeConflict(
                    f"session {session} does not hold the pause: its lease ran out, and the "
                    "server went on; attach again and write everything under a new pause"
                )
            if written:
                await self._name(self._pause.version, intact=True)
            await self._engine_resume()

    async def _abandon(self, pause: _Pause | None, why: str) -> None:
        """Go on serving after a holder that will not resume."""
        async with self._lock:
            if pause is None or self._pause is not pause:
                return
            # The write may have been cut in half: what is served now must carry neither the name
            # of the weights before nor one that the trainer will use.
            await self._name(PolicyVersion(self.version.epoch + 1, self.version.step), intact=False)
            log.warning(
                "pause abandoned; serving again", why=why, policy_version=tuple(self.version)
            )
            await self._engine_resume()

    async def _name(self, version: PolicyVersion, intact: bool) -> None:
        await self._engine.name_weights(version)
        self.version = version
        self.weights_intact = intact
        self.update_count += 1
        self.last_update_time = time.time()

    def _lease_ran_out(self) -> None:
        # The session is over as well: should the trainer wake up, it must attach anew.
        self._session = None
        self._session_ended.set()
        task = asyncio.ensure_future(self._abandon(self._pause, "its lease ran out"))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _engine_pause(self) -> None:
        try:
            async with asyncio.timeout(ENGINE_CALL_TIMEOUT_S):
                await self._engine.pause()
        except TimeoutError:
            await self._engine_resume()  # it may still come to rest, with nobody to wake it
            raise BridgeTimeout(
                f"the engine did not pause within {ENGINE_CALL_TIMEOUT_S:g} s; see the server log"
            ) from None

    async def _engine_resume(self) -> None:
        """Raises `BridgeTimeout` and marks the bridge broken where the engine stays silent."""
        if self._pause is not None:
            self._pause.timer.cancel()
        try:
            async with asyncio.timeout(ENGINE_CALL_TIMEOUT_S):
                await self._engine.resume()
        except TimeoutError:
            self.broken.set()
            raise BridgeTimeout(
                f"the engine did not resume within {ENGINE_CALL_TIMEOUT_S:g} s; the server ends"
            ) from None
        self._pause = None
