"""Keeps one engine running and restarts it after a crash or for new weights.

joining ─▶ starting ─▶ serving ─▶ draining ─▶ restarting ─▶ serving     for new weights
                       serving ─────────────▶ restarting ─▶ serving     after a crash
                                              restarting ─▶ failed      after too many failures

New weights are loaded into the running engine, if it can. A commit that fails half-way leaves it
*torn*: it ends, and the next one starts on the new, verified weights. If that fails too, an engine
with the previous weights follows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import Any

import structlog
from starlette.types import ASGIApp, Receive, Scope, Send

from grpo_core.deadline import Deadline
from grpo_core.security import refuse
from grpo_core.tree.server import ServerSettings
from grpo_core.weights.directory_checks import directory_digest
from grpo_core.weights.ref import WeightKind, WeightRef
from grpo_core.weights.servers import ABSENT_AFTER_S, REPORT_EVERY_S, ServerState, ServerStatus
from grpo_core.weights.version_log import ServerVersionLog
from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.http_server import serving
from grpo_vllm.supervisor.commits import Commit, CommitQueue, CommitRefused
from grpo_vllm.supervisor.engine import (
    LOAD_DEADLINE_S,
    Engine,
    EngineDoesNotAnswer,
    EngineRefused,
    EngineSlot,
    ForkServer,
)
from grpo_vllm.supervisor.follower import Follower, Progress
from grpo_vllm.supervisor.host import Sockets
from grpo_vllm.supervisor.joining import joined, require_like_others, servable
from grpo_vllm.supervisor.ownership import RunOwner
from grpo_vllm.supervisor.restart_policy import RestartPolicy
from grpo_vllm.weights.fetch import Fetcher
from grpo_vllm.weights.served_store import ServedStore, ServedWeights

log = structlog.get_logger()

END_MARGIN_S = 10.0
"""Time after a drain's deadline for writing the last answers and ending the engine."""
RENAME_AGAIN_S = 1.0
EXIT_FAILED = 1
UNCHECKED = "this server is not yet known to fit the run"


class Supervisor:
    """Needs a running event loop.

    Args:
        store: records the served weights, except in `shared_vllm`, where the engine records them
        host: starts engines
        versions: takes the status; None without Redis
        fetcher: brings what the trainer announces; None for servers that follow no trainer
    """

    def __init__(
        self,
        settings: ServerSettings,
        sockets: Sockets,
        store: ServedStore,
        host: ForkServer,
        versions: ServerVersionLog | None = None,
        fetcher: Fetcher | None = None,
    ) -> None:
        self._settings = settings
        self._sockets = sockets
        self._store = store
        self._versions = versions
        self._slot = EngineSlot(settings, sockets, host)
        self.commits = CommitQueue()
        self._fetcher = fetcher
        self._follower: Follower | None = None
        if versions is not None and fetcher is not None:
            check, max_staleness = servable(settings), settings.max_staleness
            self._follower = Follower(
                versions, fetcher, self.commits, check, max_staleness, self.report_now
            )
        self._policy = RestartPolicy(settings.restart_limit)
        self._phase = ServerState.STARTING
        self._reason = ""
        """Why nothing is served now."""
        self._restarts = self._crashes = self._torn = 0
        self._started = round(time.time(), 3)
        self._lost: PolicyVersion | None = None
        self._answered_at = 0.0
        self._stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reporting = asyncio.Lock()
        self._news = asyncio.Event()
        """Set at each change that others should know of."""

    def stop(self) -> None:
        """End the engine, so that `run` returns."""
        if not self._stop.done():
            self._stop.set_result(None)

    def ready(self) -> bool:
        return self._serves and self._slot.answers

    @property
    def _serves(self) -> bool:
        return self._phase in (ServerState.SERVING, ServerState.COMMITTING)

    def status(self) -> ServerStatus:
        slot, given, fetcher = self._slot, self._settings, self._fetcher
        weights = self.commits.weights
        progress = self._follower.progress if self._follower else Progress()
        in_use = self._follower.in_use if self._follower else self.commits.in_use()
        is_behind = self._phase is ServerState.SERVING and self._behind()
        return ServerStatus(
            name=given.server_name,
            url=given.advertise_url,
            weights_url=given.weights_url if given.follows else "",
            state=ServerState.BEHIND if is_behind else self._phase,
            **weights.version.fields(),
            kind=weights.kind,
            path=str(weights.path or ""),
            dtype=slot.dtype,
            reason=self._reason or self._behind() or progress.reason,
            fetching=progress.fetching,
            in_use=" ".join(sorted(in_use)),
            refused=progress.refused,
            lacks=progress.lacks,
            device=slot.device,
            workers=slot.workers,
            shares_weights=given.share_weights,
            fetch_s=progress.fetch_s,
            pause_s=progress.pause_s,
            bytes=progress.bytes,
            peer_bytes=progress.peer_bytes,
            wrong_chunks=fetcher.wrong_chunks if fetcher else 0,
            failed_sources=fetcher.failed_sources if fetcher else 0,
            restarts=self._restarts,
            crashes=self._crashes,
            torn=self._torn,
            dropped_requests=slot.channel.dropped,
            generation_tokens=slot.generation_tokens,
            engine_pid=slot.engine.pid if slot.engine else 0,
            started=self._started,
            time=round(time.time(), 3),
        )

    def _behind(self) -> str:
        return self._follower.behind if self._follower else ""

    async def run(self, owner: RunOwner | None = None) -> int:
        """`serve`, report, and keep the claim of the owner, whose error ends the server."""
        await self._slot.measure_memory()
        work = [self._report_for_ever(), self._look_for_ever(), *([owner.hold()] if owner else [])]
        beside: list[asyncio.Future[None]] = [asyncio.ensure_future(each) for each in work]
        try:
            return await self.serve(beside)
        finally:
            if self._slot.engine is not None:
                await self._slot.end()
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            if self._follower is not None:
                await self._follower.close()

    async def serve(self, beside: list[asyncio.Future[None]]) -> int:
        """Start an engine, let it serve, and end it for new weights or after a crash; then the next
        one, until `stop`. Returns the exit status: 0, or that of a first engine that failed to
        start. Raises the error of a task in `beside` that ended."""
        if not await self._join(beside):
            return 0
        commit: Commit | None = None
        is_first = True
        while not self._stop.done():
            if commit is not None:
                self.commits.weights = commit.weights
            engine = await self._slot.launch(self.commits.weights)
            started, within_s = self._slot.channel.serving, self._settings.engine_deadline_s
            await first_of(started.wait(), engine.ended, self._stop, within_s=within_s)
            if not started.is_set():
                crashed, code = engine.ended.done(), await self._slot.end()
                if self._stop.done():
                    break
                if is_first:
                    return code if code > 0 else EXIT_FAILED
                commit = await self._after_failed_start(commit, code, crashed)
                continue
            if is_first and self._versions is not None and self._follower is not None:
                await self._slot.look(behind=UNCHECKED, hold=True)
                await require_like_others(self._settings, self._versions, self._slot.dtype)
            is_first = False
            self._slot.channel.release_parked()
            self._policy.serving()
            if self._follower is not None and commit is None:
                self._follower.returned()  # for versions that were announced while it started
            self._enter(ServerState.SERVING)
            self._reason, self._answered_at = "", _now()
            await self._look()
            await self._save_served()
            if commit is not None and engine.ended.done():
                self._enter(ServerState.RESTARTING)
                commit = await self._after_failed_start(commit, await self._slot.end(), True)
                continue
            self._has_served(self.commits.weights)
            if commit is not None:
                commit.served.set_result(_now() - commit.began)
            commit = await self._take_commits(engine, beside)
            commit = await self._end(engine, commit)
        self._slot.channel.release_parked()
        return 0

    async def _join(self, beside: list[asyncio.Future[None]]) -> bool:
        """Get the weights of the first engine. False if told to stop."""
        self._enter(ServerState.JOINING)
        joining = asyncio.ensure_future(self._first_weights())
        try:
            await first_of(joining, self._stop, *beside)
            _raise_errors(beside)
            if self._stop.done():
                return False
            self._has_served(joining.result())
        finally:
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)
        self._enter(ServerState.STARTING)
        if self._follower is not None:
            beside.append(asyncio.create_task(self._follower.follow()))
        return True

    async def _first_weights(self) -> WeightRef:
        if self._versions is None or self._follower is None:
            return WeightRef()
        return await joined(self._settings, self._store, self._versions, self._follower)

    async def _take_commits(
        self, engine: Engine, beside: list[asyncio.Future[None]]
    ) -> Commit | None:
        """Load what is requested into the engine, one after another. Returns the first request that
        needs another engine; None when the engine has ended, or at a stop."""
        while (commit := await self._next_commit(engine.ended, *beside)) is not None:
            is_done = await self._apply(commit, engine, beside)
            _raise_errors(beside)
            if self._stop.done():
                break
            if is_done:
                continue
            if not (commit.renames and engine.ended.done()):
                return commit
            self.commits.requests.put_nowait(commit)  # for the next engine, with the same weights
            break
        _raise_errors(beside)
        return None

    async def _next_commit(self, *ends: asyncio.Future[Any]) -> Commit | None:
        """None if told to stop, or if one of the futures ends first."""
        taking = asyncio.create_task(self.commits.requests.get())
        await first_of(taking, self._stop, *ends)
        if not taking.done():
            taking.cancel()
            return None
        taking.result().began = _now()
        return taking.result()

    async def _apply(
        self, commit: Commit, engine: Engine, beside: list[asyncio.Future[None]]
    ) -> bool:
        """Load the weights into the engine, or rename those that it has. False if the next engine
        must start with them: it does not load them, or is torn."""
        wanted, now = commit.weights, self.commits.weights
        commit.renames |= not (wanted.trained or now.trained)  # the engine has the base model
        if commit.renames:
            commit.weights = now.model_copy(update={"version": wanted.version})
            work = _rename(engine, wanted.version)
        elif commit.restarts or wanted.path is None:
            return False
        else:
            work = self._load(engine, wanted)
        self._enter(ServerState.COMMITTING)
        loading = asyncio.ensure_future(work)
        await first_of(loading, engine.ended, self._stop, *beside)
        self._enter(ServerState.SERVING)
        if not loading.done():
            loading.cancel()
            if engine.ended.done() and not commit.renames:
                self._tear(commit, f"engine {engine.pid} ended while it loaded weights")
            return False
        try:
            pause_s = loading.result()
        except EngineRefused as error:
            is_adapter = wanted.kind is WeightKind.ADAPTER
            if commit.renames:
                self._tear(commit, str(error))
            elif is_adapter:
                commit.served.set_exception(CommitRefused(str(error)))
            return is_adapter and not commit.renames
        except EngineDoesNotAnswer as error:
            self._tear(commit, str(error))
            return False
        self._has_served(commit.weights)
        await self._save_served()
        commit.served.set_result(pause_s)
        return True

    async def _load(self, engine: Engine, weights: WeightRef) -> float:
        pause_s, self.commits.adapters = await engine.load(weights)
        return pause_s

    def _tear(self, commit: Commit, reason: str) -> None:
        commit.torn = True
        self._torn += 1
        version = tuple(commit.weights.version)
        log.error("engine.torn", policy_version=version, reason=reason)

    async def _end(self, engine: Engine, commit: Commit | None) -> Commit | None:
        """End the engine, and drain it first if another one is wanted. One that crashed or is torn
        has nothing to drain. Returns the request for which the next one starts."""
        began, dropped_before = _now(), self._slot.channel.dropped
        crashed, drain_s = engine.ended.done(), self._settings.drain_s
        is_drained = commit is not None and not (commit.torn or crashed or self._stop.done())
        if is_drained:
            self._enter(ServerState.DRAINING)
            await engine.drain(drain_s)
            await engine.ended_within(drain_s + END_MARGIN_S)
        self._enter(ServerState.RESTARTING)
        code = await self._slot.end()
        if is_drained:
            seconds, dropped = round(_now() - began, 2), self._slot.channel.dropped - dropped_before
            log.info("engine.drained", seconds=seconds, unanswered_requests=dropped)
        if self._stop.done():
            return None
        if crashed:
            self._crashes += 1
            self._reason = f"the engine ended with status {code}"
            log.error("engine.crashed", status=code, pid=engine.pid)
            if commit is None:
                return await self._back_off()
        self._restarts += 1
        return commit

    async def _after_failed_start(
        self, commit: Commit | None, code: int, crashed: bool
    ) -> Commit | None:
        """Retry, perhaps after a delay, roll back, or give up. Returns the request for which the
        next engine starts. Args: crashed: the engine ended by itself"""
        reason = f"the engine ended with status {code} before it answered; read the server's log"
        if commit is None:
            self._reason = reason
            return await self._back_off()
        if crashed and code < 0 and not commit.was_killed:  # for example by the kernel, for memory
            commit.was_killed = True
            self._crashes += 1
            hint = "it was starting; the next one starts now"
            log.error("engine.crashed", status=code, hint=hint)
            return commit
        log.error(
            "weights.rolled_back",
            requested=tuple(commit.weights.version),
            policy_version=tuple(self.commits.previous.version),
            reason=reason,
        )
        self.commits.weights = self.commits.previous
        commit.served.set_exception(CommitRefused(reason))
        self._restarts += 1
        return None

    async def _back_off(self) -> Commit | None:
        """Wait before the next engine starts. Returns the request for which it starts."""
        self._enter(ServerState.RESTARTING)
        commit, delay_s = None, self._policy.delay_after_failure(self.commits.version)
        if delay_s is None:
            commit = await self._give_up()
        else:
            log.info("restart.scheduled", delay_s=delay_s, failures=self._policy.failures)
            await first_of(self._stop, within_s=delay_s)
        self._restarts += 1
        return commit

    async def _give_up(self) -> Commit | None:
        """Answer every request with status 503, until new weights are announced."""
        self._reason = (
            f"{self._reason}; {self._policy.failures} engines failed in a row, so no more "
            "engines are started. Fix the cause of the failures, then restart this server"
        )
        self._enter(ServerState.FAILED)
        log.error("restarts.exhausted", reason=self._reason)
        async with serving(given_up(self._reason), self._sockets.public) as server:
            await server.adopt(self._slot.channel.take_parked())
            while (commit := await self._next_commit()) is not None and commit.renames:
                version = {"version": commit.weights.version}
                self._has_served(self.commits.weights.model_copy(update=version))
                await self._save_served()
                commit.served.set_result(0.0)
        self._policy.forget()
        self._enter(ServerState.RESTARTING)
        return commit

    def _enter(self, phase: ServerState) -> None:
        self._phase = phase
        self._news.set()

    def _has_served(self, weights: WeightRef) -> None:
        """Record that an engine serves these weights. A later rollback returns to them."""
        self.commits.previous = self.commits.weights = weights
        self._news.set()

    async def _save_served(self) -> None:
        """Record the served weights, so that a restarted supervisor serves them again."""
        weights = self.commits.weights
        if not self._settings.share_weights and weights != WeightRef():
            await self._store.save(ServedWeights(weights, model=self._settings.model))

    async def report_now(self) -> None:
        """Returns when others can read the status of now. One report at a time is sent, so that no
        older one follows."""
        async with self._reporting:
            self._news.clear()
            if self._versions is not None:
                await self._versions.report(self.status())

    async def _report_for_ever(self) -> None:
        """Each second, and at once after a change."""
        while True:
            await self.report_now()
            await first_of(self._news.wait(), within_s=REPORT_EVERY_S)

    async def _look_for_ever(self) -> None:
        changed = self._follower.changed if self._follower else asyncio.Event()
        while True:
            if changed.is_set():
                self._news.set()
            changed.clear()
            if self._serves:
                await self._look()
            await first_of(changed.wait(), within_s=REPORT_EVERY_S)

    async def _look(self) -> None:
        """Tell the engine whether its weights are too old, and note weights that changed without a
        commit: a trainer wrote in place, or an operator loaded or unloaded an adapter."""
        if self._follower is not None and _now() - self._answered_at > ABSENT_AFTER_S:
            self._follower.returned()  # the engine was stopped; it may have missed a commit
            self._answered_at = _now()
        progress = self._follower.progress if self._follower else Progress()
        word: dict[str, str | bool] = {
            "behind": self._behind(),
            "hold": self._follower is not None and self._follower.returning,
            "head": progress.head.id if progress.head else "",
            "staged": progress.staged,
            "group": progress.group,
        }
        engine, seen = self._slot.engine, await self._slot.look(**word)
        if seen is None or not self._serves:
            return
        self._answered_at = _now()
        self.commits.adapters = seen["in_use"]
        self._reason = seen["reason"]
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
            self._has_served(found)
            await self._save_served()

    def _is_news(self, version: PolicyVersion) -> bool:
        """True if the engine serves a newer version that the supervisor did not commit."""
        return self._phase is ServerState.SERVING and version > self.commits.version


async def _rename(engine: Engine, version: PolicyVersion) -> float:
    """An engine that is busy is asked again: to do it twice does no harm."""
    deadline = Deadline(LOAD_DEADLINE_S, _now)
    while True:
        try:
            await engine.rename_weights(version)
            return 0.0
        except EngineDoesNotAnswer as error:
            if deadline.has_passed:
                raise
            log.warning("engine.busy", reason=str(error))
        await asyncio.sleep(RENAME_AGAIN_S)


async def first_of(*waits: Awaitable[Any], within_s: float | None = None) -> None:
    """Return when one of them has ended, or after `within_s` seconds. Coroutines end with it."""
    futures = [asyncio.ensure_future(each) for each in waits]
    try:
        await asyncio.wait(futures, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for given, future in zip(waits, futures, strict=True):
            if future is not given:
                future.cancel()


def _now() -> float:
    return asyncio.get_running_loop().time()


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
