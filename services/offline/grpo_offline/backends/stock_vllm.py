"""Samples from a vLLM server that is not ours, over its OpenAI route."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from grpo_core.clients.inference import GenerateAnswer
from grpo_core.clients.service import AsyncServiceClient
from grpo_core.errors import ProtocolViolation, problems_of
from grpo_core.wire.policy_version import PolicyVersion

_SERVICE = "vLLM"
_UNTRAINED = PolicyVersion(0, 0)
_NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Otherwise vLLM takes the model's own values."""


class _Choice(BaseModel):
    model_config = ConfigDict(extra="ignore")

    text: str
    finish_reason: str | None
    token_ids: list[int] | None = None


class _Answer(BaseModel):
    model_config = ConfigDict(extra="ignore")

    choices: list[_Choice]


class StockVllm(AsyncServiceClient):
    """A `CompletionSource`. Its logprobs are placeholders: vLLM logs them before the temperature.

    Args:
        url: for example http://127.0.0.1:30000
        model: the name under which the server serves the model
        deadline_s: seconds for all completions of a prompt
        requests: largest number of requests in flight
        api_key: if the server needs one
    """

    def __init__(
        self, url: str, model: str, deadline_s: float, requests: int, api_key: str | None = None
    ) -> None:
        super().__init__(_SERVICE, url, deadline_s, deadline_s, requests, api_key)
        self._model = model

    def session(self) -> StockVllm:
        return self

    async def generate(self, prompt_token_ids: list[int], **sampling: Any) -> GenerateAnswer:
        """Raises `RequestRefused`, `ServiceUnavailable`, `ProtocolViolation`."""
        body = {
            "model": self._model,
            "prompt": prompt_token_ids,
            "return_token_ids": True,
            **_NEUTRAL,
            **sampling,
        }
        response = await self.send("POST", "/v1/completions", json=body)
        try:
            choices = _Answer.model_validate_json(response.content).choices
        except ValidationError as error:
            raise ProtocolViolation(
                f"{_SERVICE} at {self.base_url}: the response from /v1/completions is invalid: "
                f"{problems_of(error)}"
            ) from error
        tokens = [choice.token_ids for choice in choices]
        if not all(tokens):
            raise ProtocolViolation(
                f"{_SERVICE} at {self.base_url} returns no token ids; use vLLM 0.10.2 or later, or "
                "vllm-api-server"
            )
        rows = [token_ids or [] for token_ids in tokens]
        return GenerateAnswer(
            text=[choice.text for choice in choices],
            prompt="",
            finish_reasons=[choice.finish_reason or "abort" for choice in choices],
            logprobs=[[[{token: 0.0}] for token in row] for row in rows],
            prompt_token_ids=prompt_token_ids,
            token_ids=rows,
            policy_version=[(_UNTRAINED, _UNTRAINED)] * len(rows),
        )
