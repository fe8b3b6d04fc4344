"""The trainer's commands to serve different weights: read from Redis, and answered at once.

`grpo_core.weights.supervisor` defines the protocol.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import structlog

from grpo_core.errors import ProtocolViolation
from grpo_core.redis.connection import FAILURES, AsyncRedisConnection, words
from grpo_core.redis.keys import run_prefix
from grpo_core.tree.server import ServerSettings
from grpo_core.weights.directory_checks import (
    UnusableWeights,
    check_weights,
    require_servable_adapter,
)
from grpo_core.weights.ref import WeightRef
from grpo_core.weights.supervisor import (
    OUTCOME_KEPT_S,
    Action,
    Outcome,
    OutcomeState,
    SupervisorCommand,
    SupervisorPhase,
    SupervisorStatus,
    commands_key,
    outcome_key,
    status_key,
)
from grpo_vllm.supervisor.engine import EngineDoesNotAnswer, EngineRefused, EngineSlot

log = structlog.get_logger()

BLOCK_MS = 1000
TIMEOUT_S = 5.0
_READ_AT_MOST = 100


@dataclass
class SupervisorState:
    """`weights`: the weights of the running or starting engine; `previous`: the last weights that
    were served; `reason`: why nothing is served now.

    `restart`: the command that has no final answer yet; `requested` is set while there is one.
    `launched`: the same command when an engine has been started for it.
    """

    weights: WeightRef
    previous: WeightRef
    phase: SupervisorPhase = SupervisorPhase.STARTING
    reason: str = ""
    restart: SupervisorCommand | None = None
    launched: SupervisorCommand | None = None
    requested: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def serving(self) -> bool:
        return self.phase is SupervisorPhase.SERVING

    def has_served(self, weights: WeightRef) -> None:
        """Record that an engine serves these weights. A later rollback returns to them."""
        self.previous = self.weights = weights


class CommandHandler:
    """Args:
    control: delivers commands and takes the answers
    slot: holds the engine that loads adapters
    save: records the served weights
    """

    def __init__(
        self,
        settings: ServerSettings,
        control: ControlPlane,
        state: SupervisorState,
        slot: EngineSlot,
        save: Callable[[], Awaitable[None]],
    ) -> None:
        self._settings = settings
        self._control = control
        self._state = state
        self._slot = slot
        self._save = save
        self._answers: set[asyncio.Task[None]] = set()
        self.loading = False
        """True while the engine loads an adapter."""

    async def listen(self) -> None:
        """Handle commands until cancelled."""
        async for commands in self._control.commands():
            # Follow the highest version. If two commands name it, follow the later one.
            *replaced, newest = sorted(commands, key=lambda command: command.version)
            for command in replaced:
                await self._busy(command, f"{named(newest)} arrived at the same time")
            if self._state.restart is not None:
                await self._busy(newest, "another command is in progress")
            else:
                await self._follow(newest)

    def answer_restart(self, state: OutcomeState, reason: str = "") -> None:
        """Answer the command that the engine was started for, if there is one."""
        command = self._state.launched
        if command is None:
            return
        self._state.launched = self._state.restart = None
        self._state.requested.clear()
        log.info("restart_command.answered", command=named(command), outcome=state.value)
        # In the background: Redis may be down, and the engine must be watched meanwhile.
        task = asyncio.create_task(self._answer(command, state, reason))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def close(self) -> None:
        for task in self._answers:
            task.cancel()
        await asyncio.gather(*self._answers, return_exceptions=True)

    async def _follow(self, command: SupervisorCommand) -> None:
        current = self._state
        try:
            command = await checked(command, self._settings, current.weights)
        except UnusableWeights as error:
            log.warning("command.refused", command=named(command), reason=str(error))
            await self._answer(command, OutcomeState.REFUSED, str(error))
            return
        if command.weights == current.weights and current.serving:
            await self._answer(command, OutcomeState.DONE)
        elif command.action is Action.LOAD_ADAPTER and current.serving:
            await self._load(command)
        elif current.phase in (SupervisorPhase.SERVING, SupervisorPhase.FAILED):
            log.info("restart_command.accepted", command=named(command))
            await self._answer(command, OutcomeState.ACCEPTED)
            current.restart = command
            current.requested.set()
        else:
            await self._busy(command, f"the server is {current.phase.value}")

    async def _load(self, command: SupervisorCommand) -> None:
        engine = self._slot.engine
        assert engine is not None
        self.loading = True
        try:
            in_use = await engine.load_adapter(command.path, command.version)
        except EngineRefused as error:
            await self._answer(command, OutcomeState.REFUSED, str(error))
        except EngineDoesNotAnswer as error:
            await self._answer(command, OutcomeState.FAILED, str(error))
        else:
            self._state.has_served(command.weights)
            await self._save()
            await self._answer(command, OutcomeState.DONE, in_use=in_use)
        finally:
            self.loading = False

    async def _busy(self, command: SupervisorCommand, why: str) -> None:
        log.info("command.deferred", command=named(command), reason=why)
        reason = f"{why}; send this command again later"
        await self._answer(command, OutcomeState.BUSY, reason)

    async def _answer(
        self,
        command: SupervisorCommand,
        state: OutcomeState,
        reason: str = "",
        in_use: list[str] | None = None,
    ) -> None:
        outcome = Outcome(state=state, reason=reason, in_use=json.dumps(in_use or []))
        await self._control.answer(command, outcome)


def named(command: SupervisorCommand) -> str:
    sender = f" from {command.sender}" if command.sender else ""
    return f"{command.action.value} {command.version}{sender}"


async def checked(
    command: SupervisorCommand, settings: ServerSettings, served: WeightRef
) -> SupervisorCommand:
    """The command with the real path of its weights, which are checked as far as possible without
    loading them. Raises `UnusableWeights` if this server cannot serve them. Nothing was changed."""
    action = command.action
    if settings.share_weights:
        raise UnusableWeights(
            f"the server refuses {action.value}, because a trainer writes the server's "
            "weights in place; start the server without --share-weights"
        )
    wants_lora = action is not Action.RESTART_WITH_CHECKPOINT
    if wants_lora != settings.enable_lora:
        flag = "with --enable-lora" if wants_lora else "without --enable-lora"
        raise UnusableWeights(f"the server refuses {action.value}; start the server {flag}")
    # It was sent again, or a killed supervisor had not answered it.
    is_repetition = command.version == served.version and command.sha256 == served.digest
    if command.version <= served.version and not is_repetition:
        raise UnusableWeights(
            f"policy version {tuple(command.version)} is not newer than the served version "
            f"{tuple(served.version)}; give new weights a newer version"
        )
    # In a thread, because reading a large checkpoint takes seconds.
    directory = await asyncio.to_thread(check_weights, command.weights, settings.loads_from)
    if wants_lora:
        require_servable_adapter(directory, settings.max_lora_rank)
    return command.model_copy(update={"path": str(directory)})


class ControlPlane:
    """The source of commands. This one is for servers without Redis: it never delivers any."""

    async def commands(self) -> AsyncIterator[list[SupervisorCommand]]:
        """Yields the commands since the previous list, oldest first; never an empty list."""
        await asyncio.Event().wait()
        yield []

    async def answer(self, command: SupervisorCommand, outcome: Outcome) -> None:
        """Send the outcome to the sender. Writing is repeated until Redis has it."""

    async def report(self, status: SupervisorStatus) -> None:
        """Replace the status. Never raises."""


class CommandStream(ControlPlane, AsyncRedisConnection):
    """Commands in the Redis stream of the run `run_id`."""

    def __init__(self, url: str, run_id: str) -> None:
        super().__init__(url, TIMEOUT_S)
        self._run_id = run_id
        self._cursor_key = run_prefix(run_id) + "server:cursor"
        self._places: dict[str, str] = {}

    async def commands(self) -> AsyncIterator[list[SupervisorCommand]]:
        """Starts after the newest answered command, so a restarted supervisor handles the commands
        that its predecessor left unanswered. Invalid entries are logged and skipped.
        """
        at = await self.call("GET", self._cursor_key) or "0"
        while True:
            answer = await self.call(
                *("XREAD", "COUNT", _READ_AT_MOST, "BLOCK", BLOCK_MS, "STREAMS"),
                *(commands_key(self._run_id), at),
            )
            found = []
            # None or [[stream, [(place, fields), …]]]
            for place, fields in (entry for _, entries in answer or [] for entry in entries):
                at = place
                try:
                    command = SupervisorCommand.from_wire(fields)
                except ProtocolViolation as error:
                    log.warning("command.invalid", stream_id=place, reason=str(error))
                    continue
                key = outcome_key(self._run_id, command.id)
                # A previous supervisor may have answered it, and was killed before it saved `at`.
                if await self.call("HGET", key, "state") in (None, OutcomeState.ACCEPTED.value):
                    self._places[command.id] = place
                    found.append(command)
            if found:
                yield found

    async def answer(self, command: SupervisorCommand, outcome: Outcome) -> None:
        key = outcome_key(self._run_id, command.id)
        await self.call("HSET", key, *words(outcome.on_the_wire()))
        await self.call("EXPIRE", key, OUTCOME_KEPT_S)
        if outcome.state is not OutcomeState.ACCEPTED:
            place = self._places.pop(command.id, None)
            unanswered = map(_order, self._places.values())
            if place is not None and not any(other < _order(place) for other in unanswered):
                await self.call("SET", self._cursor_key, place)

    async def report(self, status: SupervisorStatus) -> None:
        try:
            await self.attempt("HSET", status_key(self._run_id), *words(status.on_the_wire()))
        except FAILURES as error:
            self.note_absence(error)


def _order(place: str) -> tuple[int, int]:
    milliseconds, _, number = place.partition("-")
    return int(milliseconds), int(number)
