"""Keeps one engine process serving the weights that the run was served last.

    starting ─▶ serving ─▶ draining ─▶ restarting ─▶ serving          commanded
                serving ─────────────▶ restarting ─▶ serving          the engine crashed
                                       restarting ─▶ failed           too often in a row

Commands are judged beside that, so that each gets its answer at once: followed, refused, or busy.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from grpo_core.handoff import (
    STATUS_EVERY_S,
    Action,
    Command,
    Outcome,
    OutcomeState,
    ServerStatus,
    SupervisorState,
)
from grpo_core.weight_files import UnusableWeights
from grpo_core.wire import PolicyVersion
from grpo_vllm.channel import SupervisorEnd, close_all
from grpo_vllm.engine_plan import EnginePlan, PlannedWeights
from grpo_vllm.served_record import WeightsRecord
from grpo_vllm.settings import ServerSettings
from grpo_vllm.supervisor.command_stream import ControlPlane
from grpo_vllm.supervisor.engine_child import (
    ENGINE_COMMAND,
    EngineChild,
    EngineDoesNotAnswer,
    EngineRefused,
)
from grpo_vllm.supervisor.first_weights import found_serving, recorded
from grpo_vllm.supervisor.memory import GpuMemory, gpu_memory, memory_is_back
from grpo_vllm.supervisor.orders import newest_first, planned
from grpo_vllm.supervisor.public_refusal import refusing
from grpo_vllm.supervisor.restart_policy import RestartPolicy
from grpo_vllm.supervisor.sockets import Sockets

log = structlog.get_logger()

END_MARGIN_S = 10.0
"""After a drain's bound, for answers to be written and the engine to be taken down."""
EXIT_USAGE = 2


@dataclass
class _Restart:
    """A command that needs another engine."""

    command: Command
    weights: PlannedWeights


@dataclass
class _Counters:
    restarts: int = 0
    crashes: int = 0
    dropped_requests: int = 0
    generation_tokens: int = 0
    tokens_of_this_engine: int = 0


class Supervisor:
    """Args:
    arguments: the command line, for engine processes
    weights: what the first engine is to serve
    record: learns what is served; where weights are shared, the engine process tells it instead
    engine_command: starts an engine process; the plan and `arguments` follow
    """

    def __init__(
        self,
        settings: ServerSettings,
        arguments: Sequence[str],
        sockets: Sockets,
        weights: PlannedWeights,
        control: ControlPlane,
        record: WeightsRecord,
        engine_command: Sequence[str] = ENGINE_COMMAND,
    ) -> None:
        self._settings = settings
        self._arguments = list(arguments)
        self._engine_command = engine_command
        self._sockets = sockets
        self._weights = weights
        self._control = control
        self._record = record
        self._policy = RestartPolicy(settings.restart_limit)
        self._channel = SupervisorEnd()
        self._state = SupervisorState.STARTING
        self._reason = ""
        self._counters = _Counters()
        self._engine: EngineChild | None = None
        self._engine_ready = False
        self._restart: _Restart | None = None
        self._before = weights
        self._loading = False
        self._answers: set[asyncio.Task[None]] = set()
        self._wanted = asyncio.Event()
        self._stop = asyncio.Event()
        self._gpu_before = GpuMemory()

    # What others see

    def stop(self) -> None:
        """End the engine and return from `run`."""
        self._stop.set()

    @property
    def engine_pid(self) -> int:
        """0 while there is none."""
        return self._engine.pid if self._engine else 0

    def ready(self) -> bool:
        return self._state is SupervisorState.SERVING and self._engine_ready

    def status(self) -> ServerStatus:
        counters = self._counters
        return ServerStatus(
            state=self._state,
            epoch=self._weights.version.epoch,
            step=self._weights.version.step,
            kind=self._weights.kind_name,
            path=str(self._weights.directory or ""),
            reason=self._reason,
            restarts=counters.restarts,
            crashes=counters.crashes,
            dropped_requests=counters.dropped_requests + self._channel.dropped,
            generation_tokens=counters.generation_tokens + counters.tokens_of_this_engine,
            engine_pid=self.engine_pid,
            time=round(time.time(), 3),
        )

    # The engine's life

    async def run(self) -> int:
        """Until `stop`; the exit status: 0, or that of a first engine that did not start."""
        self._gpu_before = await asyncio.to_thread(gpu_memory)
        beside = [
            asyncio.create_task(self._report_for_ever()),
            asyncio.create_task(self._listen_for_ever()),
        ]
        try:
            return await self._keep_serving(beside)
        finally:
            if self._engine is not None:
                await self._end(self._engine)
            for task in [*beside, *self._answers]:
                task.cancel()
            await asyncio.gather(*beside, *self._answers, return_exceptions=True)
            await self._control.report(self.status())

    async def _keep_serving(self, beside: list[asyncio.Task[None]]) -> int:
        first = True
        while not self._stop.is_set():
            if self._restart is not None and self._weights != self._restart.weights:
                self._before, self._weights = self._weights, self._restart.weights
            engine = await self._launch()
            if await self._comes_up(engine):
                first = False
                await self._serving(engine, beside)
                continue
            code = await self._end(engine)
            if self._stop.is_set():
                break
            if first and self._restart is None:
                return code if code > 0 else 1
            await self._did_not_come_up(code)
        close_all(self._channel.take_parked())
        return 0

    async def _launch(self) -> EngineChild:
        theirs = self._channel.open()
        sockets, parked = self._sockets, tuple(self._channel.parked)
        plan = EnginePlan(
            channel=theirs.fileno(),
            public=sockets.public.fileno(),
            control=sockets.control.fileno() if sockets.control else None,
            private=sockets.private.fileno(),
            parked=parked,
            weights=self._weights,
        )
        engine = await EngineChild.start(
            plan,
            self._arguments,
            self._channel,
            sockets.private_path,
            self._engine_command,
        )
        theirs.close()
        self._engine = engine
        log.info(
            "engine process started",
            pid=engine.pid,
            policy_version=tuple(self._weights.version),
            weights=str(self._weights.directory or self._settings.model),
            waiting_connections=len(parked),
        )
        return engine

    async def _comes_up(self, engine: EngineChild) -> bool:
        serving = asyncio.create_task(self._channel.serving.wait())
        await self._first_of(serving, engine, self._settings.engine_deadline_s)
        if not serving.done():
            serving.cancel()
            return False
        # The engine process has them now: ours were copies for the case that it does not start.
        close_all(self._channel.take_parked())
        return True

    async def _serving(self, engine: EngineChild, beside: list[asyncio.Task[None]]) -> None:
        """From an engine that is up to one that has ended."""
        self._policy.serving()
        self._state, self._reason = SupervisorState.SERVING, ""
        await self._note()
        self._answer_restart(OutcomeState.DONE)
        wanted = asyncio.create_task(self._wanted.wait())
        await self._first_of(wanted, engine, None, *beside)
        wanted.cancel()
        if self._stop.is_set() or engine.exit_code is not None or self._restart is None:
            await self._ended_unasked(engine)
        else:
            await self._drain(engine)

    async def _ended_unasked(self, engine: EngineChild) -> None:
        """Told to stop, or crashed."""
        code = await self._end(engine)
        if self._stop.is_set():
            return
        self._counters.crashes += 1
        self._reason = f"the engine process ended with status {code}"
        log.error("the engine process ended", status=code, pid=engine.pid)
        await self._back_off()

    async def _drain(self, engine: EngineChild) -> None:
        """Make room for the engine that `self._restart` asks for."""
        assert self._restart is not None
        restart = self._restart
        self._state = SupervisorState.DRAINING
        started = time.monotonic()
        await engine.drain(self._settings.drain_s)
        await engine.ended_within(self._settings.drain_s + END_MARGIN_S)
        self._state = SupervisorState.RESTARTING
        dropped = self._channel.dropped
        await self._end(engine)
        log.info(
            "drained",
            seconds=round(time.monotonic() - started, 2),
            dropped_requests=dropped,
            next_policy_version=tuple(restart.weights.version),
        )
        self._counters.restarts += 1

    async def _did_not_come_up(self, code: int) -> None:
        """Neither first nor serving: another try, the weights before, or none."""
        reason = f"the engine ended with status {code} before it served; the server's log says why"
        if self._restart is None:
            self._reason = reason
            await self._back_off()
            return
        log.error("the commanded weights do not come up; going back", reason=reason)
        self._weights = self._before
        self._answer_restart(OutcomeState.FAILED, reason)
        self._counters.restarts += 1

    async def _back_off(self) -> None:
        self._state = SupervisorState.RESTARTING
        delay_s = self._policy.delay_after_failure()
        if delay_s is None:
            await self._give_up()
            return
        log.info("starting the engine again", delay_s=delay_s, failures=self._policy.failures)
        await self._sleep(delay_s)
        self._counters.restarts += 1

    async def _give_up(self) -> None:
        """503 for everybody, until a command asks for weights."""
        self._state = SupervisorState.FAILED
        self._reason = (
            f"{self._reason}; {self._policy.failures} engines failed in a row, and none is started "
            "any more. Mend the cause, then start this server again, or the trainer, which asks "
            "for its weights to be served"
        )
        log.error("giving up", reason=self._reason)
        async with refusing(self._sockets.public, self._reason, self._channel.take_parked()):
            wanted = asyncio.create_task(self._wanted.wait())
            stopped = asyncio.create_task(self._stop.wait())
            await asyncio.wait([wanted, stopped], return_when=asyncio.FIRST_COMPLETED)
            wanted.cancel()
            stopped.cancel()
        self._policy.forget()
        self._state = SupervisorState.RESTARTING
        self._counters.restarts += 1

    async def _end(self, engine: EngineChild) -> int:
        code = await engine.end(self._settings.stop_grace_s)
        self._engine, self._engine_ready = None, False
        counters = self._counters
        counters.dropped_requests += self._channel.dropped
        self._channel.dropped = 0
        counters.generation_tokens += counters.tokens_of_this_engine
        counters.tokens_of_this_engine = 0
        if not await memory_is_back(self._gpu_before):
            log.error(
                "GPU memory of the engine that ended is still in use; starting another anyway"
            )
        return code

    async def _first_of(
        self,
        event: asyncio.Task[bool],
        engine: EngineChild,
        deadline_s: float | None,
        *beside: asyncio.Task[None],
    ) -> None:
        """Until the event, a stop, the engine's end, or the deadline. A task beside that ends has
        failed: its error is raised."""
        ended = asyncio.create_task(engine.wait())
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait(
            [event, ended, stopped, *beside],
            timeout=deadline_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        ended.cancel()
        stopped.cancel()
        for task in beside:
            if task.done():
                task.result()

    async def _sleep(self, seconds: float) -> None:
        """Less where a stop or a command comes."""
        tasks = [asyncio.create_task(e.wait()) for e in (self._stop, self._wanted)]
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()

    # Commands

    async def _listen_for_ever(self) -> None:
        async for commands in self._control.commands():
            found = newest_first(commands)
            for command in found.replaced:
                await self._busy(command, f"{_named(found.newest)} came at the same time")
            if self._restart is not None:
                await self._busy(found.newest, "another command is under way")
            else:
                await self._follow(found.newest)

    async def _follow(self, command: Command) -> None:
        try:
            weights = await planned(command, self._settings, self._weights)
        except UnusableWeights as error:
            log.warning("command refused", command=_named(command), reason=str(error))
            await self._control.answer(
                command, Outcome(state=OutcomeState.REFUSED, reason=str(error))
            )
            return
        if weights == self._weights and self._state is SupervisorState.SERVING:
            await self._control.answer(command, Outcome(state=OutcomeState.DONE))
        elif command.action is Action.LOAD_ADAPTER and self._state is SupervisorState.SERVING:
            await self._load(command, weights)
        elif self._state in (SupervisorState.SERVING, SupervisorState.FAILED):
            log.info("restart asked for", command=_named(command))
            await self._control.answer(command, Outcome(state=OutcomeState.ACCEPTED))
            self._restart = _Restart(command, weights)
            self._wanted.set()
        else:
            await self._busy(command, f"the server is {self._state.value}")

    async def _load(self, command: Command, weights: PlannedWeights) -> None:
        assert self._engine is not None
        assert weights.directory is not None
        self._loading = True
        try:
            in_use = await self._engine.load_adapter(weights.directory, weights.version)
        except EngineRefused as error:
            await self._control.answer(
                command, Outcome(state=OutcomeState.REFUSED, reason=str(error))
            )
        except EngineDoesNotAnswer as error:
            await self._control.answer(
                command, Outcome(state=OutcomeState.FAILED, reason=str(error))
            )
        else:
            self._weights = weights
            await self._note()
            await self._control.answer(
                command, Outcome(state=OutcomeState.DONE, in_use=json.dumps(in_use))
            )
        finally:
            self._loading = False

    async def _busy(self, command: Command, why: str) -> None:
        log.info("command not followed", command=_named(command), reason=why)
        reason = f"{why}; this one was not followed, ask again"
        await self._control.answer(command, Outcome(state=OutcomeState.BUSY, reason=reason))

    def _answer_restart(self, state: OutcomeState, reason: str = "") -> None:
        if self._restart is None:
            return
        command, self._restart = self._restart.command, None
        self._wanted.clear()
        log.info("restart answered", command=_named(command), outcome=state.value)
        # Beside: Redis may be away, and the engine wants to be watched.
        answer = self._control.answer(command, Outcome(state=state, reason=reason))
        task = asyncio.create_task(answer)
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    # What is served

    async def _note(self) -> None:
        """Whoever starts after a crash of this process finds it."""
        if not self._settings.share_weights and self._weights != PlannedWeights():
            await self._record.note(recorded(self._weights, self._settings.model))

    async def _report_for_ever(self) -> None:
        while True:
            if self._engine is not None and self._state is SupervisorState.SERVING:
                await self._look(self._engine)
            await self._control.report(self.status())
            await asyncio.sleep(STATUS_EVERY_S)

    async def _look(self, engine: EngineChild) -> None:
        try:
            seen = await engine.status()
        except (EngineDoesNotAnswer, EngineRefused) as error:
            self._engine_ready = False
            log.debug("the engine process does not answer", reason=str(error))
            return
        if engine is not self._engine:
            return
        self._engine_ready = seen["state"] in ("serving", "paused")
        self._reason = seen["reason"]
        self._counters.tokens_of_this_engine = seen["generation_tokens"]
        version = PolicyVersion(*seen["policy_version"])
        if version > self._weights.version and not self._loading:
            self._weights = await asyncio.to_thread(
                found_serving, version, seen["adapter"], self._settings.share_weights
            )
            await self._note()


def _named(command: Command) -> str:
    sender = f" from {command.sender}" if command.sender else ""
    return f"{command.action.value} {command.epoch}.{command.step}{sender}"
