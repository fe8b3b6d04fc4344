"""Answers commands to serve different weights: executes, starts or refuses each one at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import structlog

from grpo_core.weights.directory_checks import (
    UnusableWeights,
    check_weights,
    require_servable_adapter,
)
from grpo_core.weights.ref import WeightRef
from grpo_core.weights.supervisor_protocol import (
    Action,
    Command,
    Outcome,
    OutcomeState,
    SupervisorPhase,
)
from grpo_vllm.settings import ServerSettings
from grpo_vllm.supervisor.engine import EngineDoesNotAnswer, EngineRefused, EngineSlot
from grpo_vllm.supervisor.redis_commands import ControlPlane
from grpo_vllm.supervisor.state import Restart, SupervisorState

log = structlog.get_logger()


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
        command = self._state.take_launched()
        if command is None:
            return
        log.info("restart_command.answered", command=named(command), outcome=state.value)
        # In the background: Redis may be down, and the engine must be watched meanwhile.
        task = asyncio.create_task(self._answer(command, state, reason))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def close(self) -> None:
        for task in self._answers:
            task.cancel()
        await asyncio.gather(*self._answers, return_exceptions=True)

    async def _follow(self, command: Command) -> None:
        current = self._state
        try:
            weights = await planned(command, self._settings, current.weights)
        except UnusableWeights as error:
            log.warning("command.refused", command=named(command), reason=str(error))
            await self._answer(command, OutcomeState.REFUSED, str(error))
            return
        if weights == current.weights and current.serving:
            await self._answer(command, OutcomeState.DONE)
        elif command.action is Action.LOAD_ADAPTER and current.serving:
            await self._load(command, weights)
        elif current.phase in (SupervisorPhase.SERVING, SupervisorPhase.FAILED):
            log.info("restart_command.accepted", command=named(command))
            await self._answer(command, OutcomeState.ACCEPTED)
            current.request(Restart(command, weights))
        else:
            await self._busy(command, f"the server is {current.phase.value}")

    async def _load(self, command: Command, weights: WeightRef) -> None:
        engine, directory = self._slot.engine, weights.path
        assert engine is not None
        assert directory is not None
        self.loading = True
        try:
            in_use = await engine.load_adapter(directory, weights.version)
        except EngineRefused as error:
            await self._answer(command, OutcomeState.REFUSED, str(error))
        except EngineDoesNotAnswer as error:
            await self._answer(command, OutcomeState.FAILED, str(error))
        else:
            self._state.has_served(weights)
            await self._save()
            await self._answer(command, OutcomeState.DONE, in_use=in_use)
        finally:
            self.loading = False

    async def _busy(self, command: Command, why: str) -> None:
        log.info("command.deferred", command=named(command), reason=why)
        reason = f"{why}; send this command again later"
        await self._answer(command, OutcomeState.BUSY, reason)

    async def _answer(
        self,
        command: Command,
        state: OutcomeState,
        reason: str = "",
        in_use: list[str] | None = None,
    ) -> None:
        outcome = Outcome(state=state, reason=reason, in_use=json.dumps(in_use or []))
        await self._control.answer(command, outcome)


def named(command: Command) -> str:
    sender = f" from {command.sender}" if command.sender else ""
    return f"{command.action.value} {command.version}{sender}"


async def planned(command: Command, settings: ServerSettings, served: WeightRef) -> WeightRef:
    """The weights that the command asks for, checked as far as possible without loading them.

    Raises:
        UnusableWeights: this server cannot serve them. Nothing was changed.
    """
    _require_mode(command.action, settings)
    if command.version <= served.version and not _is_repetition(command, served):
        raise UnusableWeights(
            f"policy version {tuple(command.version)} is not newer than the served version "
            f"{tuple(served.version)}; give new weights a newer version"
        )
    # In a thread, because reading a large checkpoint takes seconds.
    directory = await asyncio.to_thread(check_weights, command.weights, settings.loads_from)
    if command.action is not Action.RESTART_WITH_CHECKPOINT:
        require_servable_adapter(directory, settings.max_lora_rank)
    return command.weights.model_copy(update={"path": directory})


def _require_mode(action: Action, settings: ServerSettings) -> None:
    if settings.share_weights:
        raise UnusableWeights(
            f"the server refuses {action.value}, because a trainer writes the server's "
            "weights in place; start the server without --share-weights"
        )
    wants_lora = action is not Action.RESTART_WITH_CHECKPOINT
    if wants_lora != settings.enable_lora:
        flag = "with --enable-lora" if wants_lora else "without --enable-lora"
        raise UnusableWeights(f"the server refuses {action.value}; start the server {flag}")


def _is_repetition(command: Command, served: WeightRef) -> bool:
    """True if the command was sent again, or a killed supervisor had not answered it."""
    return command.version == served.version and command.sha256 == served.digest
