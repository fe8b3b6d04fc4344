"""Queries whether one inference server is healthy and usable."""

from __future__ import annotations

import httpx
from pydantic import BaseModel, ValidationError

from grpo_core.clients.inference import SERVICE
from grpo_core.clients.retry import TransientAnswer
from grpo_core.clients.service import AsyncServiceClient
from grpo_core.errors import GrpoError, ProtocolViolation, RequestRefused, ServiceUnavailable

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
