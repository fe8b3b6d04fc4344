"""What the supervisor is doing and serving, and what it was asked for.

Shared by the part that keeps an engine alive and the part that judges commands.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from grpo_core.weights.handoff import Command, SupervisorState
from grpo_vllm.forkserver.protocol import PlannedWeights


@dataclass(frozen=True)
class Restart:
    """A command that needs another engine."""

    command: Command
    weights: PlannedWeights


@dataclass
class Situation:
    """`weights`: what is served, or will be once the engine is up; `before`: what was served last;
    `reason`: why nothing is served.

    `restart`: asked for and not answered yet; `wanted` is set as long as there is one. `launched`:
    the same once an engine is started for it; only then can it be answered.
    """

    weights: PlannedWeights
    before: PlannedWeights
    state: SupervisorState = SupervisorState.STARTING
    reason: str = ""
    restart: Restart | None = None
    launched: Restart | None = None
    wanted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def serving(self) -> bool:
        return self.state is SupervisorState.SERVING

    def ask_for(self, restart: Restart) -> None:
        self.restart = restart
        self.wanted.set()

    def turn_to_what_is_asked_for(self) -> None:
        """The next engine serves it."""
        self.launched = self.restart
        if self.restart is not None:
            self.weights = self.restart.weights

    def has_served(self, weights: PlannedWeights) -> None:
        """An engine has them: there is no need to go back further."""
        self.before = self.weights = weights

    def take_launched(self) -> Command | None:
        """The command that the engine was started for and that is to be answered now, if any."""
        launched, self.launched = self.launched, None
        if launched is None:
            return None
        self.restart = None
        self.wanted.clear()
        return launched.command
