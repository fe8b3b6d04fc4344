"""Joining a run: register until run-api has a trainer to feed."""

from __future__ import annotations

import asyncio
import time

import structlog
from pydantic import ValidationError

from grpo_core.errors import GrpoError, ProtocolViolation
from grpo_core.run_api_client import SERVICE, EnvironmentClient
from grpo_core.wire import EnvironmentRegistration, WireModel

log = structlog.get_logger()

_POLL_S = 0.5


class NoTrainer(GrpoError):
    """run-api answers, but no trainer has registered and asked for a batch in time."""


class Membership(WireModel):
    """run-api's answer to a registered environment."""

    env_id: int
    wandb_name: str
    starting_step: int
    num_steps: int


async def join_run(
    api: EnvironmentClient, registration: EnvironmentRegistration, trainer_deadline_s: float
) -> Membership:
    """Register, waiting for a trainer where there is none yet.

    Raises:
        NoTrainer: none came within `trainer_deadline_s` seconds.
        ServiceUnavailable: run-api is gone.
        RequestRefused: run-api does not take this environment.
    """
    give_up_at = time.monotonic() + trainer_deadline_s
    waiting = False
    while True:
        answer = await api.register(registration)
        if answer is not None:
            return _membership(answer)
        if not waiting:
            log.info("waiting for a trainer", deadline_s=trainer_deadline_s)
            waiting = True
        if time.monotonic() >= give_up_at:
            raise NoTrainer(
                f"no trainer registered at {api.base_url} within {trainer_deadline_s:g} s; "
                "start one with the same run-api, or raise --env.trainer-deadline-s"
            )
        await asyncio.sleep(_POLL_S)


def _membership(answer: dict[str, object]) -> Membership:
    try:
        return Membership.model_validate(answer)
    except ValidationError as error:
        raise ProtocolViolation(f"{SERVICE}: POST /register-env: {error}") from error
