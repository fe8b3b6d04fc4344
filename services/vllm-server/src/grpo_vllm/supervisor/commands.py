"""Judges commands, while the engine is kept alive beside it, so that each is answered at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import structlog

from grpo_core.weights.directory_checks import UnusableWeights, check_weights, require_rank
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
    control: where commands come from and answers go
    slot: has the engine that loads adapters
    save: stores what is served
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
        """An adapter is on its way into the engine."""

    async def listen(self) -> None:
        """For ever."""
        async for commands in self._control.commands():
            # The highest version counts; of one version, the command that came last.
            *replaced, newest = sorted(commands, key=lambda command: command.version)
            for command in replaced:
                await self._busy(command, f"{named(newest)} came at the same time")
            if self._state.restart is not None:
                await self._busy(newest, "another command is under way")
            else:
                await self._follow(newest)

    def answer_restart(self, state: OutcomeState, reason: str = "") -> None:
        """If the engine was started for one."""
        command = self._state.take_launched()
        if command is None:
            return
        log.info("restart answered", command=named(command), outcome=state.value)
        # Beside: Redis may be away, and the engine wants to be watched.
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
            log.warning("command refused", command=named(command), reason=str(error))
            await self._answer(command, OutcomeState.REFUSED, str(error))
            return
        if weights == current.weights and current.serving:
            await self._answer(command, OutcomeState.DONE)
        elif command.action is Action.LOAD_ADAPTER and current.serving:
            await self._load(command, weights)
        elif current.phase in (SupervisorPhase.SERVING, SupervisorPhase.FAILED):
            log.info("restart asked for", command=named(command))
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
        log.info("command not followed", command=named(command), reason=why)
        reason = f"{why}; this one was not followed, ask again"
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
    """What the command asks to serve, everything checked that can be without loading it.

    Raises:
        UnusableWeights: it cannot be served here; nothing was changed.
    """
    _require_mode(command.action, settings)
    if command.version <= served.version and not _is_the_same(command, served):
        raise UnusableWeights(
            f"policy version {tuple(command.version)} is not newer than {tuple(served.version)}, "
            "which is served; a version names one set of weights only"
        )
    assert settings.weights_dir is not None, "_require_mode sees to it"
    # Large checkpoints take seconds to read: not on the event loop.
    directory = await asyncio.to_thread(check_weights, command.weights, settings.weights_dir)
    if command.action is not Action.RESTART_WITH_CHECKPOINT:
        require_rank(directory, settings.max_lora_rank)
    return command.weights.model_copy(update={"path": directory})


def _require_mode(action: Action, settings: ServerSettings) -> None:
    if settings.share_weights:
        raise UnusableWeights(f"{action.value}: a trainer writes this server's weights in place")
    if settings.weights_dir is None:
        raise UnusableWeights(
            f"{action.value}: this server takes no weights from disk: start it with --weights-dir"
        )
    wants_lora = action is not Action.RESTART_WITH_CHECKPOINT
    if wants_lora != settings.enable_lora:
        flag = "with --enable-lora" if wants_lora else "without --enable-lora"
        raise UnusableWeights(f"{action.value}: start the server {flag} for that")


def _is_the_same(command: Command, served: WeightRef) -> bool:
    """Repeated by a sender, or by a supervisor that was killed before it had answered."""
    return command.version == served.version and command.sha256 == served.digest
