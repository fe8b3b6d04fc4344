"""Waits until an inference server serves the policy of a training step."""

from __future__ import annotations

import asyncio

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from grpo_core.clients.inference import SERVICE
from grpo_core.clients.service import AsyncServiceClient
from grpo_core.deadline import Deadline
from grpo_core.errors import RequestRefused, ServiceUnavailable
from grpo_core.wire.policy_version import PolicyVersion

log = structlog.get_logger()

_POLL_S = 0.1
_ATTEMPT_S = 5.0


class _BridgeInfo(BaseModel):
    model_config = ConfigDict(extra="ignore")

    policy_version: PolicyVersion


async def wait_for_step(url: str, step: int, deadline_s: float, api_key: str | None) -> None:
    """Return once the server has the weights of `step` updates. Modes that publish rarely may
    reach it late: after the deadline, the policy that is served then is taken, with a warning.

    A server without bridge never says which policy it serves, so nothing is waited for.
    """
    deadline = Deadline(deadline_s)
    async with AsyncServiceClient(SERVICE, url, _ATTEMPT_S, _ATTEMPT_S, token=api_key) as client:
        while True:
            served = await _served_step(client)
            if served is None or served >= step:
                return
            if deadline.has_passed:
                log.warning("evaluation.policy_is_older", served_step=served, step=step)
                return
            await asyncio.sleep(_POLL_S)


async def _served_step(client: AsyncServiceClient) -> int | None:
    """None: the server has no bridge. -1: it did not answer, because it restarts."""
    try:
        answer = await client.send("GET", "/bridge/info")
        return _BridgeInfo.model_validate_json(answer.content).policy_version.step
    except (RequestRefused, ValidationError):
        return None
    except ServiceUnavailable:
        return -1
