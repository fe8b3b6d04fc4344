"""Who may write the weights, when, and which version is served.

One object owns pause, version and resume. A pause is a lease held by a session; a session is one
trainer's open connection to the weight socket. The pause ends when the trainer resumes, when the
lease runs out, or when the connection closes, whichever comes first, so a trainer that dies in
the middle of a write never leaves the server silent.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Protocol

import structlog

from grpo_core.errors import GrpoError
from grpo_core.wire import PolicyVersion

log = structlog.get_logger()

ENGINE_CALL_TIMEOUT_S = 30.0


class BridgeConflict(GrpoError):
    """The session may not do this now: unknown, not the holder, or its lease is over."""


class BridgeTimeout(GrpoError):
    """The engine did not stop or start scheduling in time."""


class PausableEngine(Protocol):
    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None: ...

    async def resume_generation(self) -> None: ...


class WeightBridge:
    """Args: engine: vLLM's engine client; its requests in flight survive a pause."""

    def __init__(self, engine: PausableEngine) -> None:
        self.version = PolicyVersion(epoch=0, step=0)
        self.update_count = 0
        self.last_update_time: float | None = None
        self._engine = engine
        self._sessions: set[str] = set()
        self._holder: str | None = None
        self._lease: asyncio.TimerHandle | None = None
        self._expiry: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()

    @property
    def paused(self) -> bool:
        return self._holder is not None

    def open_session(self) -> str:
        session = uuid.uuid4().hex
        self._sessions.add(session)
        log.info("trainer attached", session=session)
        return session

    async def close_session(self, session: str) -> None:
        """The trainer's connection is gone."""
        self._sessions.discard(session)
        log.info("trainer detached", session=session)
        await self._abandon(session, "its connection closed")

    async def pause(self, session: str, lease_s: float) -> None:
        """Stop scheduling; keep requests in flight and recompute their KV cache afterwards.

        Asking again extends the lease.

        Raises:
            BridgeConflict: unknown session, or another one holds the pause.
            BridgeTimeout: the engine did not come to rest.
        """
        async with self._lock:
            if session not in self._sessions:
                raise BridgeConflict(
                    f"session {session} is not attached to this server (it may have restarted); "
                    "connect to the weight socket again"
                )
            if self._holder not in (None, session):
                raise BridgeConflict("another trainer holds the pause; run one trainer per server")
            if self._holder is None:
                await self._engine_pause()
            self._holder = session
            self._renew_lease(session, lease_s)

    async def resume(self, session: str, version: PolicyVersion | None) -> None:
        """Serve again, under `version`, or under the old one where nothing was written.

        Raises:
            BridgeConflict: the session does not hold the pause, or the version is not a new one.
            BridgeTimeout: the engine did not start again.
        """
        async with self._lock:
            if self._holder != session:
                raise BridgeConflict(
                    f"session {session} does not hold the pause: its lease ran out, and the "
                    "server went on; write the weights again under a new pause"
                )
            if version is not None and version <= self.version:
                raise BridgeConflict(
                    f"policy version {tuple(version)} is not newer than {tuple(self.version)}; "
                    "a version names one set of weights only"
                )
            if version is not None:
                self._set_version(version)
            await self._engine_resume()

    async def _abandon(self, session: str, why: str) -> None:
        """Go on serving after a holder that will not resume."""
        async with self._lock:
            if self._holder != session:
                return
            # The write may have been cut in half: what is served now must not carry the name of
            # the weights before, nor one that the trainer will use.
            self._set_version(PolicyVersion(self.version.epoch + 1, self.version.step))
            log.warning(
                "pause abandoned; serving again", why=why, policy_version=tuple(self.version)
            )
            await self._engine_resume()

    def _set_version(self, version: PolicyVersion) -> None:
        self.version = version
        self.update_count += 1
        self.last_update_time = time.time()

    def _renew_lease(self, session: str, lease_s: float) -> None:
        if self._lease is not None:
            self._lease.cancel()
        loop = asyncio.get_running_loop()
        self._lease = loop.call_later(lease_s, self._lease_expired, session)

    def _lease_expired(self, session: str) -> None:
        self._expiry = asyncio.ensure_future(self._abandon(session, "its lease ran out"))

    async def _engine_pause(self) -> None:
        try:
            async with asyncio.timeout(ENGINE_CALL_TIMEOUT_S):
                await self._engine.pause_generation(mode="keep", clear_cache=True)
        except TimeoutError:
            await self._engine_resume()  # it may still come to rest, with nobody to wake it
            raise BridgeTimeout(
                f"the engine did not pause within {ENGINE_CALL_TIMEOUT_S:g} s; see the server log"
            ) from None

    async def _engine_resume(self) -> None:
        self._holder = None
        if self._lease is not None:
            self._lease.cancel()
        try:
            async with asyncio.timeout(ENGINE_CALL_TIMEOUT_S):
                await self._engine.resume_generation()
        except TimeoutError:
            raise BridgeTimeout(
                f"the engine did not resume within {ENGINE_CALL_TIMEOUT_S:g} s; see the server log"
            ) from None
