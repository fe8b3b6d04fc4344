"""Samples from an SGLang server."""

from __future__ import annotations

from typing import Any

from grpo_core.clients.inference import GenerateAnswer
from grpo_core.clients.service import AsyncServiceClient
from grpo_offline.backends.sglang_client import SERVICE, answer_of, sampling_params


class SglangGeneration(AsyncServiceClient):
    """A `CompletionSource`.

    Its logprobs are those of softmax(logits / temperature), after a repetition penalty and before
    top-k and top-p. They are those of the logits themselves at temperature 0, and also if the
    server runs with SGLANG_RETURN_ORIGINAL_LOGPROB=1, which the trainer's checks refuse.

    Args:
        url: for example http://127.0.0.1:30000
        deadline_s: seconds for all completions of a prompt
        requests: largest number of requests in flight
        api_key: if the server needs one
    """

    def __init__(
        self, url: str, deadline_s: float, requests: int, api_key: str | None = None
    ) -> None:
        hint = "start the server, or check generation.base_url"
        super().__init__(SERVICE, url, deadline_s, deadline_s, requests, api_key, hint)

    def session(self) -> SglangGeneration:
        return self

    async def generate(self, prompt_token_ids: list[int], **sampling: Any) -> GenerateAnswer:
        """Sample completions; the parameters have vLLM's names.

        Raises:
            RequestRefused, ServiceUnavailable, ProtocolViolation: as other clients.
        """
        body = {
            "input_ids": prompt_token_ids,
            "sampling_params": sampling_params(**sampling),
            "return_logprob": True,
        }
        response = await self.send("POST", "/generate", json=body)
        return answer_of(response, prompt_token_ids)
