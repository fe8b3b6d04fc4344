"""Asks inference servers whether they are healthy, and which policy they serve."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import httpx
import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from grpo_core.clients.inference import SERVICE
from grpo_core.clients.retry import TransientAnswer
from grpo_core.clients.service import AsyncServiceClient
from grpo_core.deadline import Deadline
from grpo_core.errors import GrpoError, ProtocolViolation, RequestRefused, ServiceUnavailable
from grpo_core.wire.policy_version import PolicyVersion

_ATTEMPT_S = 5.0
_NOT_FOUND = 404


class NotAnInferenceServer(GrpoError):
    """The server at `--inference-url` is not vllm-api-server."""


class SharedWeightsHaveOneServer(GrpoError):
    """`--inference-url` names several servers, but in `shared_vllm` a run has only one server."""


class _BridgeInfo(BaseModel):
    shared_weights: bool = False


class HealthClient(AsyncServiceClient):
    """Probes one inference server.

    Args:
        others: number of the other servers that the environment uses
        attempt_s: limit on one probe; a longer one is shortened
        api_key: the server's API key; None if it needs none
    """

    def __init__(
        self,
        base_url: str,
        others: int = 0,
        attempt_s: float = _ATTEMPT_S,
        api_key: str | None = None,
    ) -> None:
        attempt_s = min(_ATTEMPT_S, attempt_s)
        super().__init__(SERVICE, base_url, attempt_s, attempt_s, token=api_key)
        self._others = others
        self._is_admitted = not others

    async def problem(self) -> Exception | None:
        """Query the server's health once. Returns None if it is healthy.

        Raises:
            SharedWeightsHaveOneServer: a trainer writes the server's weights in place, and the
                environment uses other servers too.
        """
        try:
            # A new connection each time: an open one does not tell whether a host is silent.
            await self.send_once("GET", "/health", headers={"connection": "close"})
            if not self._is_admitted:
                await self._require_own_weights()
        except RequestRefused as error:
            return NotAnInferenceServer(
                f"{error}; {self.base_url} is not vllm-api-server; check --inference-url"
            )
        except (httpx.TransportError, TransientAnswer, ServiceUnavailable) as error:
            return error
        return None

    async def _require_own_weights(self) -> None:
        if await self.shares_weights():
            raise SharedWeightsHaveOneServer(
                f"the trainer writes the weights of {self.base_url} in place, so the "
                f"{self._others} other servers of --inference-url would keep old weights; "
                "pass only one URL in --inference-url, or use a mode other than shared_vllm"
            )
        self._is_admitted = True

    async def shares_weights(self) -> bool:
        """True if a trainer writes this server's weights in place; False without a bridge."""
        try:
            answer = await self.send_once("GET", "/bridge/info")
        except RequestRefused as error:
            if error.status != _NOT_FOUND:
                raise
            return False
        try:
            return _BridgeInfo.model_validate_json(answer.content).shared_weights
        except ValidationError as error:
            fields = ", ".join(".".join(map(str, e["loc"])) or "body" for e in error.errors())
            raise ProtocolViolation(
                f"{SERVICE}: the response from /bridge/info has invalid fields: {fields}"
            ) from error


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


_STEP_POLL_S = 0.1


class _ServedInfo(BaseModel):
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
            await asyncio.sleep(_STEP_POLL_S)


async def _served_step(client: AsyncServiceClient) -> int | ServiceUnavailable | None:
    """None: the server has no bridge. The error: it did not answer."""
    try:
        answer = await client.send("GET", "/bridge/info")
        return _ServedInfo.model_validate_json(answer.content).policy_version.step
    except (RequestRefused, ValidationError):
        return None
    except ServiceUnavailable as error:
        return error


def _is_refused(error: ServiceUnavailable) -> bool:
    return isinstance(error.__cause__, httpx.ConnectError)
