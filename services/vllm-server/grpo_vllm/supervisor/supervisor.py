"""Keeps one engine running and restarts it after a crash or for new weights.

joining ─▶ starting ─▶ serving ─▶ draining ─▶ restarting ─▶ serving     for new weights
                       serving ─────────────▶ restarting ─▶ serving     after a crash
                                              restarting ─▶ failed      after too many failures
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import structlog
from starlette.types import ASGIApp, Receive, Scope, Send

from grpo_core.security import refuse
from grpo_core.tree.server import ServerSettings
from grpo_core.weights.directory_checks import directory_digest
from grpo_core.weights.ref import WeightKind, WeightRef
from grpo_core.weights.servers import ABSENT_AFTER_S, REPORT_EVERY_S, ServerState, ServerStatus
from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.http.server import serving
from grpo_vllm.supervisor.engine import Engine, EngineSlot, ForkServer
from grpo_vllm.supervisor.follower import Follower, Progress
from grpo_vllm.supervisor.host import Sockets
from grpo_vllm.supervisor.joining import FirstWeights
from grpo_vllm.supervisor.reporter import Report, Reporter
from grpo_vllm.supervisor.restart_policy import RestartPolicy
from grpo_vllm.supervisor.seat import EngineSeat, Restart, SupervisorState
from grpo_vllm.weights.fetch import Fetcher
from grpo_vllm.weights.served_store import ServedStore, ServedWeights

log = structlog.get_logger()

END_MARGIN_S = 10.0
"""Time after a drain's deadline for writing the last answers and ending the engine."""
EXIT_FAILED = 1
UNCHECKED = "this server is not yet known to fit the run"

Fits = Callable[[str], Awaitable[None]]
"""Takes the data type of the first engine. Raises an error if it is not that of the run."""


class Supervisor:
    """Args:
    store: records the served weights, except in `shared_vllm`, where the engine records them
    host: starts engines
    """

    def __init__(
        self, settings: ServerSettings, sockets: Sockets, store: ServedStore, host: ForkServer
    ) -> None:
        self._settings = settings
        self._sockets = sockets
        self._store = store
        self._state = SupervisorState()
        self._slot = EngineSlot(settings, sockets, host)
        self.seat = EngineSeat(self._state, self._slot, self._save_served)
        self.reporter = Reporter(self.status, self._state.news)
        self._follower: Follower | None = None
        self._fetcher: Fetcher | None = None
        self._fits: Fits | None = None
        self._policy = RestartPolicy(settings.restart_limit)
        self._restarts = self._crashes = 0
        self._repeated: Restart | None = None
        self._started = round(time.time(), 3)
        self._lost: PolicyVersion | None = None
        self._answered_at = 0.0
        self._stop = asyncio.Event()

    def follow(self, follower: Follower, fetcher: Fetcher, fits: Fits) -> None:
        """Commit what the follower brings. Call this before `run`."""
        self._follower, self._fetcher, self._fits = follower, fetcher, fits

    def stop(self) -> None:
        """End the engine, so that `run` returns."""
        self._stop.set()

    def ready(self) -> bool:
        return self._state.serving and self._slot.answers

    def status(self) -> ServerStatus:
        now, slot, given, fetcher = self._state, self._slot, self._settings, self._fetcher
        progress = self._follower.progress if self._follower else Progress()
        in_use = self._follower.in_use if self._follower else self.seat.in_use()
        return ServerStatus(
            name=given.server_name,
            url=given.advertise_url,
            weights_url=given.weights_url if given.follows else "",
            state=self._seen_from_outside(),
            **now.weights.version.fields(),
            kind=now.weights.kind,
            path=str(now.weights.path or ""),
            dtype=slot.dtype,
            reason=now.reason or self._behind() or progress.reason,
            fetching=progress.fetching,
            in_use=" ".join(sorted(in_use)),
            refused=progress.refused,
            shares_weights=given.share_weights,
            fetch_s=progress.fetch_s,
            pause_s=progress.pause_s,
            bytes=progress.bytes,
            peer_bytes=progress.peer_bytes,
            wrong_chunks=fetcher.wrong_chunks if fetcher else 0,
            failed_sources=fetcher.failed_sources if fetcher else 0,
            restarts=self._restarts,
            crashes=self._crashes,
            torn=self.seat.torn,
            dropped_requests=slot.channel.dropped,
            generation_tokens=slot.generation_tokens,
            engine_pid=slot.engine.pid if slot.engine else 0,
            started=self._started,
            time=round(time.time(), 3),
        )

    def _seen_from_outside(self) -> ServerState:
        if not self._state.serving:
            return self._state.phase
        if self.seat.loading:
            return ServerState.COMMITTING
        return ServerState.BEHIND if self._behind() else ServerState.SERVING

    def _behind(self) -> str:
        return self._follower.behind if self._follower else ""

    async def run(
        self,
        first: FirstWeights,
        report: Report,
        others: Iterable[Callable[[], Awaitable[None]]] = (),
    ) -> int:
        """Run until `stop`. Returns the exit status: 0, or that of a first engine that failed to
        start.

        Args:
            first: brings the weights of the first engine; its errors end the server
            report: takes the status every second, and whenever it changes
            others: run beside; an error of one ends the server
        """
        self.reporter.send = report
        await self._slot.measure_memory()
        beside: list[asyncio.Future[None]] = [
            asyncio.create_task(self.reporter.run()),
            asyncio.create_task(self._look_for_ever()),
            *(asyncio.ensure_future(other()) for other in others),
        ]
        try:
            if not await self._join(first, beside):
                return 0
            if self._follower is not None:
                beside.append(asyncio.create_task(self._follower.follow()))
            return await self._keep_serving(beside)
        finally:
            if self._slot.engine is not None:
                await self._slot.end()
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    async def _join(self, first: FirstWeights, beside: list[asyncio.Future[None]]) -> bool:
        """Get the weights of the first engine. False if told to stop."""
        self._state.phase = ServerState.JOINING
        joining = asyncio.ensure_future(first())
        try:
            await self._first_of(asyncio.Event(), joining, *beside)
            _raise_errors(beside)
            if self._stop.is_set():
                return False
            self._state.has_served(joining.result())
        finally:
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)
        self._state.phase = ServerState.STARTING
        return True

    async def _keep_serving(self, beside: list[asyncio.Future[None]]) -> int:
        first = True
        while not self._stop.is_set():
            self._state.launched = wanted = self._state.restart
            if wanted is not None:
                self._state.weights = wanted.weights
            engine = await self._slot.launch(self._state.weights)
            started = self._slot.channel.serving
            await self._first_of(started, engine.ended, within_s=self._settings.engine_deadline_s)
            if started.is_set():
                if first and self._fits is not None:
                    await self._slot.look(behind=UNCHECKED, hold=True)
                    await self._fits(self._slot.dtype)
                first = False
                self._slot.channel.release_parked()
                await self._serving(engine, beside)
                continue
            ended_itself = engine.ended.done()
            code = await self._slot.end()
            if self._stop.is_set():
                break
            if first and self._state.launched is None:
                return code if code > 0 else EXIT_FAILED
            await self._start_failed(code, ended_itself)
        self._slot.channel.release_parked()
        return 0

    async def _serving(self, engine: Engine, beside: list[asyncio.Future[None]]) -> None:
        """Watch an engine that serves, until it has ended. Raises the error of a task in `beside`
        that ended."""
        self._policy.serving()
        if self._follower is not None and self._state.launched is None:
            self._follower.returned()  # versions may have been announced while the engine started
        self._state.phase, self._state.reason = ServerState.SERVING, ""
        self._answered_at = time.monotonic()
        await self._look()
        await self._save_served()
        if engine.ended.done() and self._state.launched is not None:
            self._state.phase = ServerState.RESTARTING
            await self._start_failed(await self._slot.end())
            return
        self._state.has_served(self._state.weights)
        self._state.answer_restart()
        await self._first_of(self._state.requested, engine.ended, *beside)
        _raise_errors(beside)
        if self._stop.is_set() or engine.ended.done():
            await self._after_crash_or_stop(engine)
        elif self._state.restart is not None and self._state.restart.torn:
            self._state.phase = ServerState.RESTARTING
            await self._slot.end()
            self._restarts += 1
        else:
            await self._drain(engine)

    async def _after_crash_or_stop(self, engine: Engine) -> None:
        """The engine crashed, or the supervisor was told to stop."""
        self._state.phase = ServerState.RESTARTING
        code = await self._slot.end()
        if self._stop.is_set():
            return
        self._crashes += 1
        self._state.reason = f"the engine ended with status {code}"
        log.error("engine.crashed", status=code, pid=engine.pid)
        await self._back_off()

    async def _drain(self, engine: Engine) -> None:
        """Drain and end the engine, so that the requested one can start."""
        self._state.phase = ServerState.DRAINING
        started, drain_s = time.monotonic(), self._settings.drain_s
        dropped_before = self._slot.channel.dropped
        await engine.drain(drain_s)
        await engine.ended_within(drain_s + END_MARGIN_S)
        self._state.phase = ServerState.RESTARTING
        await self._slot.end()
        log.info(
            "engine.drained",
            seconds=round(time.monotonic() - started, 2),
            unanswered_requests=self._slot.channel.dropped - dropped_before,
        )
        self._restarts += 1

    def _repeats(self, code: int) -> bool:
        """Whether an engine that a signal ended while it started with new weights, for example the
        kernel's for want of memory, is followed by another one with them: once."""
        wanted = self._state.launched
        if code >= 0 or wanted is self._repeated:
            return False
        self._repeated = wanted
        self._crashes += 1
        log.error("engine.crashed", status=code, hint="it was starting; the next one starts now")
        return True

    async def _start_failed(self, code: int, ended_itself: bool = True) -> None:
        """An engine failed to start: roll back, retry, perhaps after a delay, or give up."""
        reason = (
            f"the engine ended with status {code} before it answered requests; "
            "read the server's log"
        )
        if self._state.launched is None:
            self._state.reason = reason
            await self._back_off()
            return
        if ended_itself and self._repeats(code):
            return
        log.error(
            "weights.rolled_back",
            requested=tuple(self._state.weights.version),
            policy_version=tuple(self._state.previous.version),
            reason=reason,
        )
        self._state.weights = self._state.previous
        self._state.answer_restart(refused=reason)
        self._restarts += 1

    async def _back_off(self) -> None:
        self._state.phase = ServerState.RESTARTING
        delay_s = self._policy.delay_after_failure(self._state.weights.version)
        if delay_s is None:
            await self._give_up()
        else:
            log.info("restart.scheduled", delay_s=delay_s, failures=self._policy.failures)
            await self._first_of(self._state.requested, within_s=delay_s)
        self._restarts += 1

    async def _give_up(self) -> None:
        """Answer every request with status 503, until new weights are announced."""
        now = self._state
        now.phase = ServerState.FAILED
        now.reason = (
            f"{now.reason}; {self._policy.failures} engines failed in a row, so no more "
            "engines are started. Fix the cause of the failures, then restart this server"
        )
        log.error("restarts.exhausted", reason=now.reason)
        async with serving(given_up(now.reason), self._sockets.public) as server:
            await server.adopt(self._slot.channel.take_parked())
            await self._first_of(self._state.requested)
        self._policy.forget()
        now.phase = ServerState.RESTARTING

    async def _first_of(
        self, event: asyncio.Event, *futures: asyncio.Future[Any], within_s: float | None = None
    ) -> None:
        """Return at the event, a stop, the end of a future, or after `within_s` seconds."""
        waits = [asyncio.create_task(each.wait()) for each in (event, self._stop)]
        await asyncio.wait(
            [*waits, *futures], timeout=within_s, return_when=asyncio.FIRST_COMPLETED
        )
        for task in waits:
            task.cancel()

    async def _save_served(self) -> None:
        """Record the served weights, so that a restarted supervisor serves them again."""
        weights = self._state.weights
        if not self._settings.share_weights and weights != WeightRef():
            await self._store.save(ServedWeights(weights, model=self._settings.model))

    async def _look_for_ever(self) -> None:
        changed = self._follower.changed if self._follower else asyncio.Event()
        while True:
            if changed.is_set():
                self._state.news.set()
            changed.clear()
            if self._state.serving:
                await self._look()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPORT_EVERY_S):
                    await changed.wait()

    async def _look(self) -> None:
        """Tell the engine whether its weights are too old, and note weights that changed without a
        commit: a trainer wrote in place, or an operator loaded or unloaded an adapter."""
        if self._follower is not None and time.monotonic() - self._answered_at > ABSENT_AFTER_S:
            self._follower.returned()  # the engine was stopped; it may have missed a commit
            self._answered_at = time.monotonic()
        progress = self._follower.progress if self._follower else Progress()
        word: dict[str, str | bool] = {
            "behind": self._behind(),
            "hold": self._follower is not None and self._follower.returning,
            "head": progress.head.id if progress.head else "",
            "staged": progress.staged,
        }
        engine, seen = self._slot.engine, await self._slot.look(**word)
        if seen is None or not self._state.serving:
            return
        self._answered_at = time.monotonic()
        self.seat.note_in_use(seen["in_use"])
        self._state.reason = seen["reason"]
        version = PolicyVersion(*seen["policy_version"])
        if not self._is_news(version):
            return
        kind = WeightKind.MEMORY if self._settings.share_weights else WeightKind.BASE
        found = WeightRef(version=version, kind=kind)
        if seen["adapter"] is not None:
            path = Path(seen["adapter"]["adapter_path"])
            try:
                digest = await asyncio.to_thread(directory_digest, path)
            except OSError as error:  # the adapter is no longer on disk
                if version != self._lost:  # log it once
                    self._lost = version
                    log.warning("adapter.unreadable", reason=str(error))
                return
            adapter = WeightKind.ADAPTER
            found = WeightRef(version=version, kind=adapter, path=path, digest=digest)
        if engine is self._slot.engine and self._is_news(version):
            self._state.has_served(found)
            await self._save_served()

    def _is_news(self, version: PolicyVersion) -> bool:
        """True if the engine serves a newer version that the supervisor did not commit."""
        now = self._state
        return now.serving and version > now.weights.version and not self.seat.loading


def _raise_errors(tasks: Iterable[asyncio.Future[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()


def given_up(reason: str) -> ASGIApp:
    """Answers every request with status 503 and the reason."""

    async def answer(scope: Scope, _receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await refuse(send, 503, reason, {b"retry-after": b"10", b"connection": b"close"})

    return answer
