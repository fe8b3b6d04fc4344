"""Routes for environments: register, disconnect, status and list."""

from __future__ import annotations

from typing import Literal

import structlog
from fastapi import APIRouter
from typing_extensions import TypedDict  # pydantic accepts `typing.TypedDict` from Python 3.12 on

from grpo_api.errors import Refused
from grpo_api.planning.batch_plan import minimum_groups
from grpo_api.planning.run_view import environment_status
from grpo_api.routes.openapi import json_body, refusals
from grpo_api.routes.requests import (
    EnvironmentIdBody,
    EnvironmentRegistrationBody,
    IdempotencyKey,
    Services,
    checked_key,
)
from grpo_api.store.run import EnvironmentEnrolled
from grpo_core.wire.run_api import (
    EnvironmentId,
    EnvironmentRegistration,
    EnvironmentStatus,
    ListedServer,
)

router = APIRouter()

_REFUSALS = refusals(400, 408, 413, 422, 503)
log = structlog.get_logger()


class Waiting(TypedDict):
    """The environment is not registered, because no trainer has requested a batch yet."""

    status: Literal["wait for trainer to start"]


class Succeeded(TypedDict):
    status: Literal["success"]


class Failed(TypedDict):
    """run-api has no environment with this `env_id`."""

    status: Literal["failure"]
    error: str


class KnownEnvironment(TypedDict):
    env_id: int
    name: str
    connected: bool
    group_size: int
    min_sequences: int


@router.post("/register-env", responses=_REFUSALS, openapi_extra=json_body(EnvironmentRegistration))
async def register_environment(
    registration: EnvironmentRegistrationBody,
    services: Services,
    idempotency_key: IdempotencyKey = None,
) -> EnvironmentEnrolled | Waiting:
    """Register an environment."""
    enrolled = await services.store.register_environment(registration, checked_key(idempotency_key))
    if enrolled is None:
        return {"status": "wait for trainer to start"}
    log.info(
        "environment.registered",
        env_id=enrolled["env_id"],
        name=enrolled["wandb_name"],
        group_size=registration.group_size,
        min_batch_allocation=registration.min_batch_allocation,
    )
    if registration.min_batch_allocation:
        run = await services.store.view()
        least = run.demand().least
        scaled = [
            own.env_id
            for own in run.connected()
            if least.get(own.kind, 0) < minimum_groups(own.kind, own.minimum, run.batch_size)
        ]
        if scaled:
            log.warning(
                "min_batch_allocation.scaled_down",
                env_ids=scaled,
                hint="one batch cannot contain the min_batch_allocation of all; lower them",
            )
    return enrolled


@router.post("/disconnect-env", responses=_REFUSALS, openapi_extra=json_body(EnvironmentId))
async def disconnect_environment(
    environment: EnvironmentIdBody, services: Services
) -> Succeeded | Failed:
    """Remove an environment and its partial groups from the run. run-api answers with status 200
    even if the `env_id` is unknown."""
    parts_dropped = await services.store.disconnect(environment.env_id)
    if parts_dropped is None:
        return {"status": "failure", "error": _unknown(environment.env_id)}
    log.info(
        "environment.disconnected", env_id=environment.env_id, partial_groups_dropped=parts_dropped
    )
    return {"status": "success"}


@router.get(
    "/status-env", responses=_REFUSALS | refusals(404), openapi_extra=json_body(EnvironmentId)
)
async def status_of_environment(
    environment: EnvironmentIdBody, services: Services
) -> EnvironmentStatus:
    """The step of the run and the size of the queue, from which an environment decides how many
    groups it samples at once, and the run's inference servers. As in Atropos, `GET /status-env` has
    a request body."""
    run = await services.store.view(environment.env_id)
    for own in run.environments:
        if own.env_id == environment.env_id:
            servers = await services.store.servers.listed()
            return environment_status(own, run, services.limits, servers)
    raise Refused(404, _unknown(environment.env_id))


@router.get("/environments", responses=refusals(503))
async def list_environments(services: Services) -> list[KnownEnvironment]:
    """A list of the environments of the run: all that have registered and not left. An environment
    is connected if it sent a request to /status-env lately.

    `min_sequences` is the minimum number of the environment's sequences in the next batch.
    """
    run = await services.store.view()
    least = run.demand().least
    return [
        {
            "env_id": environment.env_id,
            "name": environment.name,
            "connected": environment.connected,
            "group_size": environment.registration.group_size,
            "min_sequences": least.get(environment.kind, 0) * environment.kind.sequences,
        }
        for environment in run.environments
    ]


@router.get("/servers", responses=refusals(503))
async def list_servers(services: Services) -> list[ListedServer]:
    """The inference servers of the run that report themselves, as in the answer of `/status-env`:
    name, URL, state, and the policy version that each serves."""
    return await services.store.servers.listed()


def _unknown(env_id: int) -> str:
    return f"no environment has env_id {env_id}; register one with POST /register-env"
