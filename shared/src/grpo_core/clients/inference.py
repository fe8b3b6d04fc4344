"""Clients of the inference server: generation for environments (async), control for trainers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from grpo_core.clients.service import AsyncServiceClient, ServiceClient
from grpo_core.errors import ProtocolViolation
from grpo_core.wire.policy_version import PolicyVersion

SERVICE = "vllm-server"
_PROBE_TIMEOUT_S = 300.0
"""Of a few tokens, behind whatever the server has to do before."""
_CONTROL_TIMEOUT_S = 60.0
_PROBE_DEADLINE_S = 5.0
"""The trainer that asks is also the one who would bring a restarted server to answer."""

AWAITING_STATES = frozenset({"awaiting_weights", "failed"})
"""`state` of a server that waits for a trainer to write the weights back; failed: for too long."""


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
    policy_version: list[tuple[PolicyVersion, PolicyVersion]]
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
                    first_version=versions[0],
                    last_version=versions[1],
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


class GenerationClient(AsyncServiceClient):
    """What an environment asks of the inference server.

    Args:
        base_url: with or without a trailing /v1, for example http://127.0.0.1:9001/v1
        deadline_s: how long one call may keep trying
        answer_s: how long the completions of one call may take
        api_key: where the server asks for one (VLLM_API_KEY)
    """

    def __init__(
        self,
        base_url: str,
        deadline_s: float,
        answer_s: float,
        max_connections: int,
        api_key: str | None = None,
    ) -> None:
        super().__init__(SERVICE, base_url, deadline_s, answer_s, max_connections, api_key)
        self._answer_s = answer_s

    async def generate(
        self, prompt_token_ids: list[int], within_s: float | None = None, **sampling: Any
    ) -> GenerateAnswer:
        """Sample completions of one prompt in one request.

        Args:
            prompt_token_ids: [T]
            within_s: what is left of a deadline that other servers have used up in part
            sampling: any vLLM sampling parameter, e.g. n, max_tokens, temperature.

        Raises:
            RequestRefused: a parameter is wrong.
            ServiceUnavailable: the server did not answer within the deadline.
            ProtocolViolation: the answer breaks the contract.
        """
        body = {"prompt": {"prompt_token_ids": prompt_token_ids}, "logprobs": 0, **sampling}
        answer_s = self._answer_s if within_s is None else within_s
        answer = await self.send("POST", "/generate", answer_s=answer_s, json=body)
        return _parse_generate(answer)


class BridgeInfo(BaseModel):
    """`GET /bridge/info`, as far as a trainer reads it."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    policy_version: PolicyVersion
    paused: bool
    weights_intact: bool
    weights_socket: str | None
    generation: str | None = None
    state: str = "serving"
    model_name: str | None = None
    dtype: str | None = None
    """Of the weights: "float32", "bfloat16"."""
    max_model_len: int | None = None
    """Tokens of the longest sequence."""
    kv_block_size: int | None = None
    """Tokens that are cached, or not, together."""
    lora_enabled: bool = False

    @property
    def awaiting_weights(self) -> bool:
        """The server started again in the middle of a run: what it loaded from disk is whole, but
        not what it served before, and nobody is answered until a trainer has written."""
        return self.state in AWAITING_STATES


class BridgeClient(ServiceClient):
    """What a trainer asks of the inference server.

    Args:
        control_url: where the routes that change state are; None for `base_url`.
        api_key: where the server asks for one (VLLM_API_KEY)
    """

    def __init__(
        self,
        base_url: str,
        deadline_s: float = 60.0,
        control_url: str | None = None,
        api_key: str | None = None,
    ) -> None:
        super().__init__(SERVICE, base_url, deadline_s, _PROBE_TIMEOUT_S, api_key)
        self._control = ServiceClient(
            f"{SERVICE} control", control_url or base_url, deadline_s, _CONTROL_TIMEOUT_S, api_key
        )

    def give_up_if(self, has_ended: Callable[[], bool]) -> None:
        """Repeat no request once `has_ended`: the memory of a server that ended is to be released,
        and only then may there be room for the next one."""
        self.has_ended = self._control.has_ended = has_ended

    def close(self) -> None:
        self._control.close()
        super().close()

    def info(self, deadline_s: float | None = None) -> BridgeInfo:
        answer = self.send("GET", "/bridge/info", deadline_s=deadline_s)
        return BridgeInfo.model_validate_json(answer.content)

    def pause(self, session: str, lease_s: float, version: PolicyVersion) -> None:
        """Stop scheduling, keep requests in flight, drop the KV cache.

        `version` names the weights that are about to be written. The server resumes by itself
        after `lease_s` seconds, or as soon as the session's connection closes.

        Raises:
            RequestRefused: the session is not the server's (it restarted, or a lease ran out), or
                the version is not a new one.
        """
        body = {"session": session, "lease_s": lease_s, "policy_version": list(version)}
        self._change("/bridge/pause", body)

    def resume(self, session: str, written: bool) -> None:
        """Serve again, under the new version where everything was `written`.

        Raises:
            RequestRefused: the pause is not held by this session any more: the lease ran out.
        """
        self._change("/bridge/resume", {"session": session, "written": written})

    def _change(self, path: str, body: dict[str, Any]) -> None:
        # A pause or resume that was carried out must not be sent again: the second would be
        # judged against what the first has changed.
        self._control.send("POST", path, repeat_lost_answers=False, json=body)

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

    def _generate(self, prompt_token_ids: list[int], **sampling: Any) -> GenerateAnswer:
        body = {"prompt": {"prompt_token_ids": prompt_token_ids}, "logprobs": 0, **sampling}
        answer = self.send("POST", "/generate", deadline_s=_PROBE_DEADLINE_S, json=body)
        return _parse_generate(answer)


def _parse_generate(response: httpx.Response) -> GenerateAnswer:
    try:
        return GenerateAnswer.model_validate_json(response.content)
    except ValidationError as error:
        raise ProtocolViolation(f"{SERVICE}: /generate breaks the contract: {error}") from error
