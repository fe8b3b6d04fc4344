"""Waits until an inference server serves the policy of a training step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import httpx
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


async def wait_for_step(
    urls: Sequence[str], step: int, deadline_s: float, api_key: str | None
) -> None:
    """Return once one of the servers has the weights of `step` updates. Modes that publish rarely
    may reach it late: after the deadline, the policy that is served then is taken, with a warning.

    A server without bridge never says which policy it serves, so nothing is waited for.

    Raises:
        ServiceUnavailable: nothing listens at any of the URLs. A server that restarts its engine
            keeps its socket open, so this one has ended.
    """
    deadline = Deadline(deadline_s)
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                AsyncServiceClient(SERVICE, url, _ATTEMPT_S, _ATTEMPT_S, token=api_key)
            )
            for url in urls
        ]
        while True:
            found = await asyncio.gather(*map(_served_step, clients))
            failures = [one for one in found if isinstance(one, ServiceUnavailable)]
            if len(failures) == len(found) and all(map(_is_refused, failures)):
                raise failures[0]
            served = [one for one in found if not isinstance(one, ServiceUnavailable)]
            steps = [one for one in served if one is not None]
            if len(steps) < len(served) or max(steps, default=-1) >= step:
                return
            if deadline.has_passed:
                log.warning(
                    "evaluation.policy_is_older", served_step=max(steps, default=-1), step=step
                )
                return
            await asyncio.sleep(_POLL_S)


async def _served_step(client: AsyncServiceClient) -> int | ServiceUnavailable | None:
    """None: the server has no bridge. The error: it did not answer."""
    try:
        answer = await client.send("GET", "/bridge/info")
        return _BridgeInfo.model_validate_json(answer.content).policy_version.step
    except (RequestRefused, ValidationError):
        return None
    except ServiceUnavailable as error:
        return error


def _is_refused(error: ServiceUnavailable) -> bool:
    return isinstance(error.__cause__, httpx.ConnectError)
