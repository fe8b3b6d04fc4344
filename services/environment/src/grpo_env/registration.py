"""Joining a run: register until run-api has a trainer to feed."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

import structlog

from grpo_core.clients.run_api import EnvironmentClient
from grpo_core.clients.run_api_answers import parse
from grpo_core.deadline import Deadline
from grpo_core.errors import GrpoError
from grpo_core.wire.fields import WireModel
from grpo_core.wire.run_api import EnvironmentRegistration
from grpo_env.config.settings import EnvServerSettings

log = structlog.get_logger()

_POLL_S = 0.5


ENDLESS = sys.maxsize
"""Steps of a run that nobody bounds."""


class NoTrainer(GrpoError):
    """run-api answers, but no trainer asks for batches."""


class Membership(WireModel):
    """run-api's answer to a registered environment."""

    env_id: int
    wandb_name: str
    starting_step: int
    num_steps: int

    def total_steps(self, own: int, latest: int | None = None) -> int:
        """Where the run ends; a trainer whose number is below 1 leaves it open.

        Args:
            own: this environment's setting, -1 for the trainer's number
            latest: what the trainer says now, if it does; it may be another one than that of this
                membership
        """
        if own != -1:
            return own
        num_steps = self.num_steps if latest is None else latest
        return num_steps if num_steps > 0 else ENDLESS


def registration_of(settings: EnvServerSettings) -> EnvironmentRegistration:
    """What this environment announces."""
    return EnvironmentRegistration(
        max_token_length=settings.seq_len,
        desired_name=settings.display_name,
        weight=settings.weight,
        group_size=settings.group_size,
        min_batch_allocation=settings.min_batch_allocation,
    )


async def join_run(
    api: EnvironmentClient, registration: EnvironmentRegistration, trainer_deadline_s: float
) -> Membership:
    """Register, waiting for a trainer where there is none yet.

    Raises:
        NoTrainer: none came within `trainer_deadline_s` seconds.
        ServiceUnavailable: run-api is gone.
        RequestRefused: run-api does not take this environment.
    """
    deadline = Deadline(trainer_deadline_s)
    waiting = False
    while True:
        answer = await api.register(registration)
        if answer is not None:
            return parse(Membership, answer)
        if not waiting:
            log.info("waiting for a trainer", deadline_s=trainer_deadline_s)
            waiting = True
        if deadline.has_passed:
            raise NoTrainer(
                f"no trainer registered at {api.base_url} within {trainer_deadline_s:g} s; "
                "start one with the same run-api, or raise --trainer-deadline-s"
            )
        await asyncio.sleep(_POLL_S)


class StallDetector:
    """Ends the work if no batch is taken for `deadline_s` while there is nothing to do."""

    def __init__(self, deadline_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._deadline_s = deadline_s
        self._clock = clock
        self._step = -1
        self._since = clock()

    def observe(self, step: int, idle: bool) -> None:
        """Note how far the run is.

        Raises:
            NoTrainer: idle, and no step was taken for the deadline.
        """
        if step != self._step or not idle:
            self._step, self._since = step, self._clock()
        elif self._clock() - self._since >= self._deadline_s:
            raise NoTrainer(
                f"no batch was taken for {self._deadline_s:g} s, and the queue holds all that this "
                "environment may send: is the trainer alive, and do the other environments send? "
                "Look at /status and /environments of run-api"
            )
