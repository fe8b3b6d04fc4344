"""Waits at the start until an inference server is healthy, and refuses unusable servers.

One healthy server is enough, because `InferencePool` probes the others and uses each as soon as it
is healthy: a server that is down must not delay a run that can proceed without it. The pool logs
each server that is not healthy by name, so a wrong URL is noticed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import httpx
import structlog

from grpo_core.clients.inference import SERVICE
from grpo_core.deadline import Deadline
from grpo_core.errors import ServiceUnavailable
from grpo_env.inference.health import HealthClient, NotAnInferenceServer

log = structlog.get_logger()

_POLL_S = 1.0


async def wait_for_servers(
    urls: Sequence[str], deadline_s: float, api_key: str | None = None
) -> None:
    """Wait until one of the servers answers `GET /health`.

    Raises:
        ServiceUnavailable: no server was healthy within the deadline.
        NotAnInferenceServer: another kind of server answers at a URL.
        SharedWeightsHaveOneServer: one of several servers shares its weights with a trainer.
    """
    deadline = Deadline(deadline_s)
    problems: dict[str, Exception] = {}
    async with AsyncExitStack() as stack:
        servers = [HealthClient(url, len(urls) - 1, deadline_s, api_key) for url in urls]
        for server in servers:
            await stack.enter_async_context(server)
        while not await _is_one_healthy(servers, problems):
            if deadline.has_passed:
                raise ServiceUnavailable(
                    f"{_listed(problems, deadline_s)}; read the server's log, check "
                    "--inference-url, or raise --start-deadline-s"
                )
            await asyncio.sleep(_POLL_S)


async def _is_one_healthy(servers: Sequence[HealthClient], problems: dict[str, Exception]) -> bool:
    """Probe all servers at once, and add their problems by URL."""
    found = await asyncio.gather(*(server.problem() for server in servers))
    for problem in found:
        if isinstance(problem, NotAnInferenceServer):
            raise problem
    if None in found:
        return True
    for server, problem in zip(servers, found, strict=True):
        assert problem is not None
        if server.base_url not in problems:
            log.info(
                "wait_for_server.started",
                url=server.base_url,
                reason=_named(problem),
                hint="start vllm-api-server, or check --inference-url",
            )
        # A timeout is less informative than an earlier error.
        if server.base_url not in problems or not isinstance(problem, httpx.TimeoutException):
            problems[server.base_url] = problem
    return False


def _listed(problems: dict[str, Exception], deadline_s: float) -> str:
    return "; ".join(
        f"{SERVICE} at {url} is not healthy after {deadline_s:g} s; the last error was: "
        f"{_named(problem)}"
        for url, problem in problems.items()
    )


def _named(problem: Exception) -> str:
    return str(problem) or type(problem).__name__
