"""Sends each request to the least busy inference server that works."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import structlog

from grpo_core.clients.inference import SERVICE, GenerateAnswer, GenerationClient
from grpo_core.deadline import Deadline
from grpo_core.errors import GrpoError, RequestRefused, ServiceUnavailable
from grpo_core.process.closing import ClosesOnAsyncExit
from grpo_env.pacing.failure_budget import FailureBudget

log = structlog.get_logger()

_FAILOVER_DEADLINE_S = 2.0
"""If there are several servers, a request moves to the next one after so many seconds."""
_NOT_FOUND = 404


class NoGenerateRoute(GrpoError):
    """The server at `--inference-url` has no route `POST /generate`."""


@dataclass
class _Server:
    client: GenerationClient
    budget: FailureBudget
    busy: int = 0


class InferencePool(ClosesOnAsyncExit):
    """Samples completions on one or several servers.

    Args:
        urls: with or without a trailing /v1.
        deadline_s: how long completions may take, and how long a single server may be
            unreachable. If there are several, a request moves to the next server much earlier.
        max_requests: the largest number of requests in flight at one server.
        api_key: the servers' API key; None if they need none.
        clock: in seconds; measures how long a failed server gets no requests.
    """

    def __init__(
        self,
        urls: Sequence[str],
        deadline_s: float,
        max_requests: int,
        api_key: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        attempt_s = deadline_s if len(urls) == 1 else min(deadline_s, _FAILOVER_DEADLINE_S)
        self._deadline_s = deadline_s
        self._servers = [
            _Server(
                GenerationClient(url, attempt_s, deadline_s, max_requests, api_key),
                FailureBudget(f"{SERVICE} at {url}", float("inf"), clock),
            )
            for url in urls
        ]

    async def generate(self, prompt_token_ids: list[int], **sampling: Any) -> GenerateAnswer:
        """As `GenerationClient.generate`, on the first server that works.

        Raises:
            ServiceUnavailable: every server failed; the message is that of the last one.
            NoGenerateRoute: the server has no such route.
        """
        failure: ServiceUnavailable | None = None
        deadline = Deadline(self._deadline_s)
        # Servers that failed recently come last, so they are tried only if all others fail.
        for server in sorted(self._servers, key=lambda s: (s.budget.delay_s > 0, s.busy)):
            try:
                return await _generate(server, prompt_token_ids, deadline.left_s, sampling)
            except ServiceUnavailable as error:
                failure = error
                server.budget.failed(error)
                if len(self._servers) > 1:
                    log.warning("server.failed", url=server.client.base_url, reason=str(error))
        assert failure is not None
        raise failure

    async def close(self) -> None:
        async with AsyncExitStack() as stack:
            for server in self._servers:
                stack.push_async_callback(server.client.close)


async def _generate(
    server: _Server, prompt_token_ids: list[int], within_s: float, sampling: dict[str, Any]
) -> GenerateAnswer:
    server.busy += 1
    try:
        answer = await server.client.generate(prompt_token_ids, within_s, **sampling)
    except RequestRefused as error:
        if error.status == _NOT_FOUND:
            raise NoGenerateRoute(
                f"404 Not Found on /generate at {server.client.base_url}: this server is "
                "not vllm-api-server (stock vLLM has no /generate); start vllm-api-server, or "
                "check --inference-url"
            ) from error
        raise
    finally:
        server.busy -= 1
    server.budget.succeeded()
    return answer
