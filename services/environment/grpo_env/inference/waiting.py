"""Waits until inference servers are healthy, or until they serve a policy."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import httpx
import structlog

from grpo_core.clients.inference import SERVICE
from grpo_core.deadline import Deadline
from grpo_core.errors import ServiceUnavailable
from grpo_core.wire.policy_version import PolicyVersion
from grpo_env.inference.health import HealthClient, NotAnInferenceServer, named
from grpo_env.inference.places import Place
from grpo_env.inference.pool import InferencePool

log = structlog.get_logger()

_POLL_S = 1.0
_STEP_POLL_S = 0.1


async def wait_for_servers(
    urls: Sequence[str], deadline_s: float, api_key: str | None = None
) -> None:
    """Wait at the start until one of the servers answers `GET /health`.

    One is enough, because `InferencePool` probes the others and uses each as soon as it is healthy:
    a server that is down must not delay a run that can proceed without it. The pool logs each
    server that is not healthy by name, so a wrong URL is noticed.

    Raises:
        ServiceUnavailable: no server was healthy within the deadline.
        NotAnInferenceServer: another kind of server answers at a URL.
        SharedWeightsHaveOneServer: one of several servers shares its weights with a trainer.
    """
    deadline = Deadline(deadline_s)
    problems: dict[str, Exception] = {}
    async with AsyncExitStack() as stack:
        clients = (HealthClient(Place(url), len(urls) - 1, api_key, deadline_s) for url in urls)
        servers = [await stack.enter_async_context(client) for client in clients]
        while True:
            found = await asyncio.gather(*(server.problem() for server in servers))
            for problem in found:
                if isinstance(problem, NotAnInferenceServer):
                    raise problem
            if None in found:
                return
            for server, problem in zip(servers, found, strict=True):
                assert problem is not None
                url = server.base_url
                if url not in problems:
                    hint = "start vllm-api-server, or check --inference-url"
                    log.info("wait_for_server.started", url=url, reason=named(problem), hint=hint)
                # A timeout is less informative than an earlier error.
                if url not in problems or not isinstance(problem, httpx.TimeoutException):
                    problems[url] = problem
            if deadline.has_passed:
                listed = "; ".join(
                    f"{SERVICE} at {url} is not healthy after {deadline_s:g} s: {named(problem)}"
                    for url, problem in problems.items()
                )
                raise ServiceUnavailable(
                    f"{listed}; read its log, check --inference-url, or raise --start-deadline-s"
                )
            await asyncio.sleep(_POLL_S)


async def wait_for_step(pool: InferencePool, step: int) -> frozenset[Place]:
    """Return once one of the pool's servers has the weights of `step` updates. Modes that publish
    rarely may reach it late: after the pool's deadline, the policy that is served then is taken,
    with a warning.

    A server without bridge never says which policy it serves, so nothing is waited for.

    Returns:
        The servers of the newest version; empty if they are unknown.

    Raises:
        ServiceUnavailable: nothing listens at any of the URLs. A server that restarts its engine
            keeps its socket open, so this one has ended.
    """
    deadline = Deadline(pool.deadline_s)
    clients: dict[Place, HealthClient] = {}
    async with AsyncExitStack() as stack:
        while True:
            asked = pool.places
            for place in asked:
                if place not in clients:
                    client = HealthClient(place, api_key=pool.api_key)
                    clients[place] = await stack.enter_async_context(client)
            found = await asyncio.gather(*(clients[place].served_version() for place in asked))
            failures = [one for one in found if isinstance(one, ServiceUnavailable)]
            refused = [e for e in failures if isinstance(e.__cause__, httpx.ConnectError)]
            if len(refused) == len(found):
                raise refused[0]
            if None in found:
                return frozenset()
            by_place = zip(asked, found, strict=True)
            versions = {place: v for place, v in by_place if isinstance(v, PolicyVersion)}
            newest = max(versions.values(), default=PolicyVersion(0, -1))
            if newest.step < step and deadline.has_passed:
                log.warning("evaluation.policy_is_older", served_step=newest.step, step=step)
            if newest.step >= step or deadline.has_passed:
                return frozenset(place for place, v in versions.items() if v == newest)
            await asyncio.sleep(_STEP_POLL_S)
