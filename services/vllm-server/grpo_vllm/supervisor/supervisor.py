"""Keeps one engine running and restarts it after a crash or on a command.

starting ─▶ serving ─▶ draining ─▶ restarting ─▶ serving          on a command
            serving ─────────────▶ restarting ─▶ serving          after a crash
                                   restarting ─▶ failed           after too many failures in a row
"""

from __future__ import annotations

import asyncio
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
from grpo_core.weights.supervisor import (
    STATUS_EVERY_S,
    OutcomeState,
    SupervisorPhase,
    SupervisorStatus,
)
from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.http.server import serving
from grpo_vllm.supervisor.commands import CommandHandler, ControlPlane, SupervisorState
from grpo_vllm.supervisor.engine import Engine, EngineSlot, ForkServer
from grpo_vllm.supervisor.host import Sockets
from grpo_vllm.weights.served_store import ServedStore, ServedWeights

log = structlog.get_logger()

END_MARGIN_S = 10.0
"""Time after a drain's deadline for writing the last answers and ending the engine."""
EXIT_FAILED = 1
FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0
STABLE_AFTER_S = 60.0
"""An engine that has served for so long resets the count of failures."""


class Supervisor:
    """Args:
    weights: the weights of the first engine
    control: delivers commands
    store: records the served weights, except in `shared_vllm`, where the engine records them
    host: starts engines
    """

    def __init__(
        self,
        settings: ServerSettings,
        sockets: Sockets,
        weights: WeightRef,
        control: ControlPlane,
        store: ServedStore,
        host: ForkServer,
    ) -> None:
        self._settings = settings
        self._sockets = sockets
        self._control = control
        self._store = store
        self._state = SupervisorState(weights=weights, previous=weights)
        self._slot = EngineSlot(settings, sockets, host)
        self._commands = CommandHandler(
            settings, control, self._state, self._slot, self._save_served
        )
        self._policy = RestartPolicy(settings.restart_limit)
        self._restarts = self._crashes = 0
        self._lost: PolicyVersion | None = None
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """End the engine, so that `run` returns."""
        self._stop.set()

    def ready(self) -> bool:
        return self._state.serving and self._slot.answers

    def status(self) -> SupervisorStatus:
        now, slot = self._state, self._slot
        return SupervisorStatus(
            state=now.phase,
            **now.weights.version.fields(),
            kind=now.weights.kind,
            path=str(now.weights.path or ""),
            reason=now.reason,
            restarts=self._restarts,
            crashes=self._crashes,
            dropped_requests=slot.channel.dropped,
            generation_tokens=slot.generation_tokens,
            engine_pid=slot.engine.pid if slot.engine else 0,
            time=round(time.time(), 3),
        )

    async def run(self, others: Iterable[Callable[[], Awaitable[None]]] = ()) -> int:
        """Run until `stop`. Returns the exit status: 0, or that of a first engine that failed to
        start. An error of one of `others`, which run beside, ends the server."""
        await self._slot.measure_memory()
        beside: list[asyncio.Future[None]] = [
            asyncio.create_task(self._report_for_ever()),
            asyncio.create_task(self._commands.listen()),
            *(asyncio.ensure_future(other()) for other in others),
        ]
        try:
            return await self._keep_serving(beside)
        finally:
            if self._slot.engine is not None:
                await self._slot.end()
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            await self._commands.close()
            await self._control.report(self.status())

    async def _keep_serving(self, beside: list[asyncio.Future[None]]) -> int:
        first = True
        while not self._stop.is_set():
            self._state.launched = command = self._state.restart
            if command is not None:
                self._state.weights = command.weights
            engine = await self._slot.launch(self._state.weights)
            started = self._slot.channel.serving
            await self._first_of(started, engine.ended, within_s=self._settings.engine_deadline_s)
            if started.is_set():
                first = False
                self._slot.channel.release_parked()
                await self._serving(engine, beside)
                continue
            code = await self._slot.end()
            if self._stop.is_set():
                break
            if first and self._state.launched is None:
                return code if code > 0 else EXIT_FAILED
            await self._start_failed(code)
        self._slot.channel.release_parked()
        return 0

    async def _serving(self, engine: Engine, beside: list[asyncio.Future[None]]) -> None:
        """Watch an engine that serves, until it has ended. Raises the error of a task in `beside`
        that ended."""
        self._policy.serving()
        self._state.phase, self._state.reason = SupervisorPhase.SERVING, ""
        await self._save_served()
        if engine.ended.done() and self._state.launched is not None:
            self._state.phase = SupervisorPhase.RESTARTING
            await self._start_failed(await self._slot.end())
            return
        self._state.has_served(self._state.weights)
        self._commands.answer_restart(OutcomeState.DONE)
        await self._first_of(self._state.requested, engine.ended, *beside)
        for task in beside:
            if task.done():
                task.result()
        if self._stop.is_set() or engine.ended.done():
            await self._after_crash_or_stop(engine)
        else:
            await self._drain(engine)

    async def _after_crash_or_stop(self, engine: Engine) -> None:
        """The engine crashed, or the supervisor was told to stop."""
        self._state.phase = SupervisorPhase.RESTARTING
        code = await self._slot.end()
        if self._stop.is_set():
            return
        self._crashes += 1
        self._state.reason = f"the engine ended with status {code}"
        log.error("engine.crashed", status=code, pid=engine.pid)
        await self._back_off()

    async def _drain(self, engine: Engine) -> None:
        """Drain and end the engine, so that the requested one can start."""
        self._state.phase = SupervisorPhase.DRAINING
        started, drain_s = time.monotonic(), self._settings.drain_s
        dropped_before = self._slot.channel.dropped
        await engine.drain(drain_s)
        await engine.ended_within(drain_s + END_MARGIN_S)
        self._state.phase = SupervisorPhase.RESTARTING
        await self._slot.end()
        log.info(
            "engine.drained",
            seconds=round(time.monotonic() - started, 2),
            unanswered_requests=self._slot.channel.dropped - dropped_before,
        )
        self._restarts += 1

    async def _start_failed(self, code: int) -> None:
        """An engine failed to start: roll back, retry after a delay, or give up."""
        reason = (
            f"the engine ended with status {code} before it answered requests; "
            "read the server's log"
        )
        if self._state.launched is None:
            self._state.reason = reason
            await self._back_off()
            return
        log.error(
            "weights.rolled_back",
            requested=tuple(self._state.weights.version),
            policy_version=tuple(self._state.previous.version),
            reason=reason,
        )
        self._state.weights = self._state.previous
        self._commands.answer_restart(OutcomeState.FAILED, reason)
        self._restarts += 1

    async def _back_off(self) -> None:
        self._state.phase = SupervisorPhase.RESTARTING
        delay_s = self._policy.delay_after_failure(self._state.weights.version)
        if delay_s is None:
            await self._give_up()
        else:
            log.info("restart.scheduled", delay_s=delay_s, failures=self._policy.failures)
            await self._first_of(self._state.requested, within_s=delay_s)
        self._restarts += 1

    async def _give_up(self) -> None:
        """Answer every request with status 503, until a command asks for weights."""
        now = self._state
        now.phase = SupervisorPhase.FAILED
        now.reason = (
            f"{now.reason}; {self._policy.failures} engines failed in a row, so no more "
            "engines are started. Fix the cause of the failures, then restart this server"
        )
        log.error("restarts.exhausted", reason=now.reason)
        async with serving(given_up(now.reason), self._sockets.public) as server:
            await server.adopt(self._slot.channel.take_parked())
            await self._first_of(self._state.requested)
        self._policy.forget()
        now.phase = SupervisorPhase.RESTARTING

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

    async def _report_for_ever(self) -> None:
        while True:
            if self._state.serving:
                await self._look()
            await self._control.report(self.status())
            await asyncio.sleep(STATUS_EVERY_S)

    async def _look(self) -> None:
        """Note weights that changed without a command: a trainer wrote in place, or an operator
        loaded or unloaded an adapter."""
        engine, seen = self._slot.engine, await self._slot.look()
        if seen is None or not self._state.serving:
            return
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
        """True if the engine serves a newer version that the supervisor did not request."""
        now = self._state
        return now.serving and version > now.weights.version and not self._commands.loading


class RestartPolicy:
    """Args: limit: failures in a row after which the supervisor gives up."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self.failures = 0
        self._serving_since: float | None = None
        self._served: PolicyVersion | None = None

    def serving(self) -> None:
        """Record that an engine serves."""
        self._serving_since = self._clock()

    def delay_after_failure(self, served: PolicyVersion) -> float | None:
        """Seconds to wait after an engine crashed or failed to start: 1, 2, 4, … up to 30. None
        means to give up.

        Args: served: the last served version. If it is newer than at the previous failure, the
            count of failures starts again.
        """
        since, self._serving_since = self._serving_since, None
        is_stable = since is not None and self._clock() - since >= STABLE_AFTER_S
        if is_stable or (self._served is not None and served > self._served):
            self.failures = 0
        self._served = served
        self.failures += 1
        if self.failures >= self._limit:
            return None
        return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** (self.failures - 1))

    def forget(self) -> None:
        """Reset the count of failures, because a command asked for other weights."""
        self.failures = 0


def given_up(reason: str) -> ASGIApp:
    """Answers every request with status 503 and the reason."""

    async def answer(scope: Scope, _receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await refuse(send, 503, reason, {b"retry-after": b"10", b"connection": b"close"})

    return answer
