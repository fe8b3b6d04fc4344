"""Waits at the start until the inference servers are healthy, and refuses unusable ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import httpx
import structlog
from pydantic import BaseModel, ValidationError

from grpo_core.clients.inference import SERVICE
from grpo_core.clients.retry import TransientAnswer, check_answer
from grpo_core.clients.service import AsyncServiceClient
from grpo_core.deadline import Deadline
from grpo_core.errors import GrpoError, ProtocolViolation, RequestRefused, ServiceUnavailable

log = structlog.get_logger()

_POLL_S = 1.0
_ATTEMPT_S = 5.0
_NOT_FOUND = 404


class NotAnInferenceServer(GrpoError):
    """The server at `--inference-url` is not vllm-api-server."""


class SharedWeightsHaveOneServer(GrpoError):
    """`--inference-url` names several servers, but in `shared_vllm` a run has only one server."""


class _BridgeInfo(BaseModel):
    shared_weights: bool = False


class HealthClient(AsyncServiceClient):
    """Queries the health and the bridge of one inference server."""

    def __init__(
        self, base_url: str, deadline_s: float = _ATTEMPT_S, api_key: str | None = None
    ) -> None:
        attempt_s = min(_ATTEMPT_S, deadline_s)
        super().__init__(SERVICE, base_url, attempt_s, attempt_s, token=api_key)

    async def wait_until_healthy(self, deadline_s: float) -> None:
        """Raises `ServiceUnavailable` after the deadline, `NotAnInferenceServer` on a 4xx."""
        deadline = Deadline(deadline_s)
        last: Exception | None = None
        while (failure := await self._failure()) is not None:
            if last is None:
                log.info(
                    "wait_for_server.started",
                    url=self.base_url,
                    reason=str(failure) or type(failure).__name__,
                    hint="start vllm-api-server, or check --inference-url",
                )
            # A timeout is less informative than an earlier error.
            if last is None or not isinstance(failure, httpx.TimeoutException):
                last = failure
            if deadline.has_passed:
                raise ServiceUnavailable(
                    f"{SERVICE} at {self.base_url} is not healthy after {deadline_s:g} s; the last "
                    f"error was: {str(last) or type(last).__name__}; read the server's log, check "
                    "--inference-url, or raise --start-deadline-s"
                ) from last
            await asyncio.sleep(_POLL_S)

    async def _failure(self) -> Exception | None:
        """Query the server's health once. Returns the error; None if it is healthy."""
        try:
            check_answer(await self._http.get("/health"), SERVICE)
        except RequestRefused as error:
            raise NotAnInferenceServer(
                f"{error}; {self.base_url} is not vllm-api-server; check --inference-url"
            ) from error
        except (httpx.TransportError, TransientAnswer, ServiceUnavailable) as error:
            return error
        return None

    async def shares_weights(self) -> bool:
        """True if a trainer writes this server's weights in place; False without a bridge."""
        try:
            answer = await self.send("GET", "/bridge/info")
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


async def wait_for_servers(
    urls: Sequence[str], deadline_s: float, api_key: str | None = None
) -> None:
    """Wait until every server answers `GET /health`.

    Raises:
        ServiceUnavailable: a server did not answer within the deadline.
        NotAnInferenceServer: another kind of server answers at a URL.
        SharedWeightsHaveOneServer: one of several servers shares its weights with a trainer.
    """
    for url in urls:
        async with HealthClient(url, deadline_s, api_key) as server:
            await server.wait_until_healthy(deadline_s)
            if len(urls) > 1 and await server.shares_weights():
                raise SharedWeightsHaveOneServer(
                    f"the trainer writes the weights of {server.base_url} in place, so the "
                    f"{len(urls) - 1} other servers of --inference-url would keep old weights; "
                    "pass only one URL in --inference-url, or use a mode other than shared_vllm"
                )
