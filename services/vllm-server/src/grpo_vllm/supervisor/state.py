"""The supervisor's state, shared by the part that keeps an engine alive and the part that judges
commands; and how often, and how soon, an engine that ended is started again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from grpo_core.weights.ref import WeightRef
from grpo_core.weights.supervisor_protocol import Command, SupervisorPhase
from grpo_core.wire.policy_version import PolicyVersion

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0
STABLE_AFTER_S = 60.0
"""An engine that has served for so long ends a series of failures."""


@dataclass(frozen=True)
class Restart:
    """A command that needs another engine."""

    command: Command
    weights: WeightRef


@dataclass
class SupervisorState:
    """`weights`: what is served, or will be once the engine is up; `previous`: served last;
    `reason`: why nothing is served.

    `restart`: asked for and not answered yet; `requested` is set as long as there is one.
    `launched`: the same once an engine is started for it; only then can it be answered.
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
        """The next engine serves it."""
        self.launched = self.restart
        if self.restart is not None:
            self.weights = self.restart.weights

    def has_served(self, weights: WeightRef) -> None:
        """An engine has them: there is no need to go back further."""
        self.previous = self.weights = weights

    def take_launched(self) -> Command | None:
        """The command that the engine was started for and that is to be answered now, if any."""
        launched, self.launched = self.launched, None
        if launched is None:
            return None
        self.restart = None
        self.requested.clear()
        return launched.command


class RestartPolicy:
    """Args: limit: failures in a row after which nothing is tried any more."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self.failures = 0
        self._serving_since: float | None = None
        self._served: PolicyVersion | None = None

    def serving(self) -> None:
        """An engine is up."""
        self._serving_since = self._clock()

    def delay_after_failure(self, served: PolicyVersion) -> float | None:
        """Seconds to wait after an engine ended or did not come up; None to give up.

        1, 2, 4, … seconds, at most 30.

        Args: served: last; newer weights than at the failure before end a series too.
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
        """Somebody asked for other weights: what failed before says nothing about them."""
        self.failures = 0
