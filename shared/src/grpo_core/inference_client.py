"""Clients of the inference server: generation for environments (async), control for trainers."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from grpo_core.errors import ProtocolViolation
from grpo_core.retry import (
    TransientAnswer,
    async_retrying,
    check_answer,
    is_safe_to_repeat,
    is_transient,
    retrying,
    unavailable,
)
from grpo_core.wire import PolicyVersion

SERVICE = "vllm-server"
_REQUEST_TIMEOUT_S = 300.0
_CONTROL_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Completion:
    """One sampled completion.

    `token_ids` and `logprobs` have one length [T]; `first_version` and `last_version` name the
    weights that sampled its first and its last token.
    """

    text: str
    finish_reason: str
    token_ids: list[int]
    logprobs: list[float]
    first_version: PolicyVersion
    last_version: PolicyVersion


class GenerateAnswer(BaseModel):
    """`POST /generate`, as it stands on the wire."""

    model_config = ConfigDict(extra="ignore")

    text: list[str]
    prompt: str
    finish_reasons: list[str]
    logprobs: list[list[list[dict[int, float]]]]
    prompt_token_ids: list[int]
    token_ids: list[list[int]]
    policy_version: list[tuple[tuple[int, int], tuple[int, int]]]
    prompt_logprobs: list[dict[int, float] | None] | None = None

    def completions(self) -> list[Completion]:
        """Raises `ProtocolViolation` where the parallel lists do not line up."""
        try:
            return [
                Completion(
                    text=text,
                    finish_reason=reason,
                    token_ids=token_ids,
                    logprobs=_sampled_logprobs(token_ids, logprobs),
                    first_version=PolicyVersion(*versions[0]),
                    last_version=PolicyVersion(*versions[1]),
                )
                for text, reason, token_ids, logprobs, versions in zip(
                    self.text,
                    self.finish_reasons,
                    self.token_ids,
                    self.logprobs,
                    self.policy_version,
                    strict=True,
                )
            ]
        except (ValueError, KeyError, IndexError) as error:
            raise ProtocolViolation(f"{SERVICE}: /generate lists disagree: {error!r}") from error


def _sampled_logprobs(token_ids: list[int], logprobs: list[list[dict[int, float]]]) -> list[float]:
    return [entry[0][token] for token, entry in zip(token_ids, logprobs, strict=True)]


class GenerationClient:
    """What an environment asks of the inference server.

    Args:
        base_url: with or without a trailing /v1, for example http://127.0.0.1:9001/v1
    """

    def __init__(self, base_url: str, deadline_s: float = 60.0, max_connections: int = 256) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._deadline_s = deadline_s
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            timeout=httpx.Timeout(_REQUEST_TIMEOUT_S, pool=None),
            limits=httpx.Limits(max_connections=max_connections),
        )

    async def generate(self, prompt_token_ids: list[int], **sampling: Any) -> GenerateAnswer:
        """Sample completions of one prompt in one request.

        Args:
            prompt_token_ids: [T]
            sampling: any vLLM sampling parameter, e.g. n, max_tokens, temperature.

        Raises:
            RequestRefused: a parameter is wrong.
            ServiceUnavailable: the server did not answer within the deadline.
            ProtocolViolation: the answer breaks the contract.
        """
        body = {"prompt": {"prompt_token_ids": prompt_token_ids}, "logprobs": 0, **sampling}
        try:
            async for attempt in async_retrying(self._deadline_s, is_transient):
                with attempt:
                    response = await self._http.post("/generate", json=body)
                    check_answer(response, SERVICE)
        except (httpx.TransportError, TransientAnswer) as error:
            raise unavailable(SERVICE, self.base_url, self._deadline_s, error) from error
        return _parse_generate(response)

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


class BridgeInfo(BaseModel):
    """`GET /bridge/info`: how weights are shared and which version is served."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    enabled: bool
    model_name: str
    generation: str | None
    policy_version: tuple[int, int]
    paused: bool
    weights_socket: str | None


class BridgeClient:
    """What a trainer asks of the inference server's control routes."""

    def __init__(self, base_url: str, deadline_s: float = 60.0) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._deadline_s = deadline_s
        self._http = httpx.Client(base_url=self.base_url, timeout=_CONTROL_TIMEOUT_S)

    def info(self) -> BridgeInfo:
        return BridgeInfo.model_validate(self._request("GET", "/bridge/info"))

    def pause(self, session: str, lease_s: float) -> None:
        """Stop scheduling, keep requests in flight, drop the KV cache.

        The server resumes by itself after `lease_s` seconds, or as soon as the session's
        connection closes.

        Raises:
            RequestRefused: the session is not the server's (it restarted), or another holds it.
        """
        self._request("POST", "/bridge/pause", {"session": session, "lease_s": lease_s})

    def resume(self, session: str, version: PolicyVersion | None) -> None:
        """Serve again; `version` names the new weights, None says that they did not change.

        Raises:
            RequestRefused: the pause is not held by this session any more: the lease ran out.
        """
        self._request(
            "POST",
            "/bridge/resume",
            {"session": session, "policy_version": list(version) if version else None},
        )

    def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """Served log-probabilities (temperature 1) of token_ids[1:], each given those before it.

        Args:
            token_ids: [T]
        Returns:
            [T-1]
        """
        answer = self._generate(token_ids, prompt_logprobs=0, max_tokens=1)
        entries = answer.prompt_logprobs or []
        if len(entries) != len(token_ids):
            raise ProtocolViolation(
                f"{SERVICE}: {len(entries)} prompt_logprobs for {len(token_ids)} tokens"
            )
        return [
            (entry or {})[token] for token, entry in zip(token_ids[1:], entries[1:], strict=True)
        ]

    def sample(self, prompt_token_ids: list[int], **sampling: Any) -> Completion:
        """One completion of one prompt."""
        return self._generate(prompt_token_ids, **sampling).completions()[0]

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _generate(self, prompt_token_ids: list[int], **sampling: Any) -> GenerateAnswer:
        body = {"prompt": {"prompt_token_ids": prompt_token_ids}, "logprobs": 0, **sampling}
        return _parse_generate(self._send("POST", "/generate", body))

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._send(method, path, body).json()

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        try:
            for attempt in retrying(self._deadline_s, is_safe_to_repeat):
                with attempt:
                    response = self._http.request(method, path, json=body)
                    check_answer(response, SERVICE)
        except (httpx.TransportError, TransientAnswer) as error:
            raise unavailable(SERVICE, self.base_url, self._deadline_s, error) from error
        return response


def _parse_generate(response: httpx.Response) -> GenerateAnswer:
    try:
        return GenerateAnswer.model_validate_json(response.content)
    except ValidationError as error:
        raise ProtocolViolation(f"{SERVICE}: /generate breaks the contract: {error}") from error
