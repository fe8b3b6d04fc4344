"""The supervisor's state, and the rules for starting a failed engine again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from grpo_core.weights.ref import WeightRef
from grpo_core.weights.supervisor import Command, SupervisorPhase
from grpo_core.wire.policy_version import PolicyVersion

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0
STABLE_AFTER_S = 60.0
"""An engine that has served for so long resets the count of failures."""


@dataclass(frozen=True)
class Restart:
    """A command that needs a new engine, and the weights that it asks for."""

    command: Command
    weights: WeightRef


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
    restart: Restart | None = None
    launched: Restart | None = None
    requested: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def serving(self) -> bool:
        return self.phase is SupervisorPhase.SERVING

    def request(self, restart: Restart) -> None:
        self.restart = restart
        self.requested.set()

    def launch_requested(self) -> None:
        """Record that the next engine is started for the pending command, if there is one."""
        self.launched = self.restart
        if self.restart is not None:
            self.weights = self.restart.weights

    def has_served(self, weights: WeightRef) -> None:
        """Record that an engine serves these weights. A later rollback returns to them."""
        self.previous = self.weights = weights

    def take_launched(self) -> Command | None:
        """Take the command that the engine was started for, to answer it; None if there is none."""
        launched, self.launched = self.launched, None
        if launched is None:
            return None
        self.restart = None
        self.requested.clear()
        return launched.command


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
