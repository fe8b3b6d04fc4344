"""Environments: they register, pace themselves by `/status-env`, and leave."""

from __future__ import annotations

from typing import Any

import structlog
from fastapi import APIRouter

from grpo_api.allocation import environment_status
from grpo_api.bodies import EnvironmentIdBody, EnvironmentRegistrationBody
from grpo_api.dependencies import Store
from grpo_api.errors import Refused
from grpo_core.wire import EnvironmentStatus

router = APIRouter()
_log = structlog.get_logger()


@router.post("/register-env")
async def register_environment(
    registration: EnvironmentRegistrationBody, store: Store
) -> dict[str, Any]:
    registered = await store.register_environment(registration)
    if registered is None:
        return {"status": "wait for trainer to start"}
    _log.info(
        "environment registered",
        env_id=registered.env_id,
        name=registered.name,
        group_size=registration.group_size,
    )
    return {
        "status": "success",
        "env_id": registered.env_id,
        "wandb_name": registered.name,
        "checkpoint_dir": registered.trainer.checkpoint_dir,
        "starting_step": registered.step,
        "checkpoint_interval": registered.trainer.save_checkpoint_interval,
        "num_steps": registered.trainer.num_steps,
    }


@router.post("/disconnect-env")
async def disconnect_environment(environment: EnvironmentIdBody, store: Store) -> dict[str, str]:
    if not await store.disconnect(environment.env_id):
        return {"status": "failure", "error": _unknown(environment.env_id)}
    _log.info("environment disconnected", env_id=environment.env_id)
    return {"status": "success"}


@router.get("/status-env")
async def status_of_environment(environment: EnvironmentIdBody, store: Store) -> EnvironmentStatus:
    environments, counters = await store.environments_and_counters()
    for own in environments:
        if own.env_id == environment.env_id:
            return environment_status(own, environments, counters)
    raise Refused(404, _unknown(environment.env_id))


@router.get("/environments")
async def list_environments(store: Store) -> list[dict[str, Any]]:
    """For operators and runners: everyone who has registered, connected or not."""
    return [
        {
            "env_id": environment.env_id,
            "name": environment.name,
            "connected": environment.connected,
            "group_size": environment.registration.group_size,
        }
        for environment in await store.environments()
    ]


def _unknown(env_id: int) -> str:
    return f"no environment with env_id {env_id} is registered; POST /register-env gives one"
