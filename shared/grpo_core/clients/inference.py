"""Clients of the inference server: generation for environments, control for trainers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import BaseModel

from grpo_core.clients.service import AsyncServiceClient, ServiceClient
from grpo_core.errors import ProtocolViolation, parsing
from grpo_core.weights.servers import EngineState
from grpo_core.wire.policy_version import PolicyVersion

SERVICE = "vllm-server"
_PROBE_TIMEOUT_S = 300.0
"""Limit on a request for a few tokens, which may wait behind the server's other work."""
_CONTROL_TIMEOUT_S = 60.0
_PROBE_DEADLINE_S = 5.0
"""Short, because a restarted server answers only after this same trainer wrote its weights."""


@dataclass(frozen=True)
class Completion:
    """One sampled completion.

    `token_ids` and `logprobs` have the same length [T]. `first_version` and `last_version` name the
    weights that sampled its first and last token.

    Example: `Completion("7", "stop", [90, 91], [-0.4, -1.2], PolicyVersion(1, 7), PolicyVersion(1,
    8))`. The weights were updated between its two tokens.
    """

    text: str
    finish_reason: str
    token_ids: list[int]
    logprobs: list[float]
    first_version: PolicyVersion
    last_version: PolicyVersion
    receipt: Mapping[str, Any] | None = None
    """A `grpo_core.wire.receipt.CompletionReceipt`, as the server sent it."""


class GenerateAnswer(BaseModel, extra="ignore"):
    """The JSON answer of `POST /generate`.

    Example: one completion of the prompt 5 6, of the tokens 90 and 91:

        text              ["7"]          prompt            "3+4="
        finish_reasons    ["stop"]       prompt_token_ids  [5, 6]
        token_ids         [[90, 91]]     policy_version    [((1, 7), (1, 8))]
        logprobs          [[[{90: -0.4}], [{91: -1.2}]]]
    """

    text: list[str]
    prompt: str
    finish_reasons: list[str]
    logprobs: list[list[list[dict[int, float]]]]
    prompt_token_ids: list[int]
    token_ids: list[list[int]]
    policy_version: list[tuple[PolicyVersion, PolicyVersion]]
    prompt_logprobs: list[dict[int, float] | None] | None = None
    receipts: list[dict[str, Any] | None] | None = None

    def completions(self) -> list[Completion]:
        """Raises `ProtocolViolation` if the lists differ in length or lack an entry."""
        try:
            return [
                Completion(
                    text=text,
                    finish_reason=reason,
                    token_ids=token_ids,
                    logprobs=[
                        entry[0][token] for token, entry in zip(token_ids, logprobs, strict=True)
                    ],
                    first_version=first,
                    last_version=last,
                    receipt=receipt,
                )
                for text, reason, token_ids, logprobs, (first, last), receipt in zip(
                    self.text,
                    self.finish_reasons,
                    self.token_ids,
                    self.logprobs,
                    self.policy_version,
                    self.receipts or [None] * len(self.text),
                    strict=True,
                )
            ]
        except (ValueError, KeyError, IndexError) as error:
            raise ProtocolViolation(
                f"{SERVICE}: lists from /generate differ in length or lack a value: {error!r}"
            ) from error


class GenerationClient(AsyncServiceClient):
    """An environment's client of one inference server. Repeats nothing: `InferencePool` does."""

    async def generate(
        self, prompt_token_ids: list[int], within_s: float | None = None, **sampling: Any
    ) -> GenerateAnswer:
        """Sample completions of one prompt in one request.

        Args:
            prompt_token_ids: [T]
            within_s: replaces the client's limit for this call
            sampling: any vLLM sampling parameter, e.g. n, max_tokens, temperature.

        Raises:
            RequestRefused: a parameter is wrong.
            ServiceUnavailable: the server answered with status 5xx; a repeat is useless.
            httpx.TransportError, TransientAnswer: the request failed; a repeat may succeed.
            ProtocolViolation: the answer breaks the protocol.
        """
        body = {"prompt": {"prompt_token_ids": prompt_token_ids}, "logprobs": 0, **sampling}
        return _parse_generate(await self.send_once("POST", "/generate", within_s, json=body))


class BridgeInfo(BaseModel, extra="ignore"):
    """The fields of `GET /bridge/info` that a trainer reads."""

    policy_version: PolicyVersion
    paused: bool
    weights_intact: bool
    weights_socket: str | None
    generation: str | None = None
    state: str = EngineState.SERVING
    """An `EngineState`, or another word of a newer server."""
    model_name: str | None = None
    dtype: str | None = None
    """Data type of the weights: "float32", "bfloat16"."""
    max_model_len: int | None = None
    """Limit on the tokens of one sequence."""
    kv_block_size: int | None = None
    """Number of tokens in one block of the KV cache."""
    lora_enabled: bool = False
    run_id: str | None = None
    """The server's run in Redis; None if it runs without Redis."""
    name: str | None = None
    """The server's --server-name; None if it runs without Redis."""

    @property
    def awaiting_weights(self) -> bool:
        """Whether the server restarted during a run and needs a trainer to write back the weights.

        The weights that it loaded from disk are not those that it served before the restart, so it
        answers no request until then.
        """
        return self.state in (EngineState.AWAITING_WEIGHTS, EngineState.FAILED)


class BridgeClient(ServiceClient):
    """A trainer's client of the inference server.

    Args:
        control_url: base URL of the routes that change state; None for `base_url`.
        api_key: if the server needs one (VLLM_API_KEY)
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
        """Stop retrying once `has_ended` is true.

        The trainer can then release the shared memory, which a new server may need.
        """
        self.has_ended = self._control.has_ended = has_ended

    def close(self) -> None:
        self._control.close()
        super().close()

    def info(self, deadline_s: float | None = None) -> BridgeInfo:
        answer = self.send("GET", "/bridge/info", deadline_s=deadline_s)
        return BridgeInfo.model_validate_json(answer.content)

    def pause(
        self, session: str, lease_s: float, version: PolicyVersion, *, writing: bool = True
    ) -> float:
        """Pause sampling, keep requests in flight (or finish short ones), drop the KV cache.
        Returns the seconds that the server grants.

        `version` names the weights that the trainer will write, and `writing` that it begins to
        write them. The pause ends by itself after `lease_s` seconds, or when the session's
        connection closes. If weights were written, the server then waits for all of them.

        Raises:
            RequestRefused: the session is not valid (the server restarted, or a lease expired), or
                the version is not a new one.
        """
        body = {"session": session, "lease_s": lease_s, "policy_version": list(version)}
        # In the query, which servers of earlier releases ignore.
        path = "/bridge/pause" if writing else "/bridge/pause?writing=false"
        return float(self._change(path, body).json()["lease_s"])

    def resume(self, session: str, written: bool) -> None:
        """Resume sampling; with the new version if all weights were `written`.

        Raises:
            RequestRefused: this session no longer holds the pause, because its lease expired.
        """
        self._change("/bridge/resume", {"session": session, "written": written})

    def _change(self, path: str, body: dict[str, Any]) -> httpx.Response:
        # A pause or resume must not be repeated after it was carried out: the server would check
        # the repeat against the state that the first one changed.
        return self._control.send("POST", path, repeat_lost_answers=False, json=body)

    def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """The server's logprobs of token_ids[1:] at temperature 1, each given the previous tokens.

        Args:
            token_ids: [T]
        Returns:
            [T-1]
        """
        answer = self._generate(token_ids, prompt_logprobs=0, max_tokens=1)
        _, *entries = answer.prompt_logprobs or [None]
        try:
            return [(e or {})[token] for token, e in zip(token_ids[1:], entries, strict=True)]
        except (KeyError, ValueError) as error:
            raise ProtocolViolation(
                f"{SERVICE}: prompt_logprobs in the response from /generate does not hold the "
                f"logprobs of the {len(token_ids)} tokens of the prompt"
            ) from error

    def sample(self, prompt_token_ids: list[int], **sampling: Any) -> Completion:
        """Sample one completion of one prompt."""
        return self._generate(prompt_token_ids, **sampling).completions()[0]

    def _generate(self, prompt_token_ids: list[int], **sampling: Any) -> GenerateAnswer:
        body = {"prompt": {"prompt_token_ids": prompt_token_ids}, "logprobs": 0, **sampling}
        answer = self.send("POST", "/generate", deadline_s=_PROBE_DEADLINE_S, json=body)
        return _parse_generate(answer)


def _parse_generate(response: httpx.Response) -> GenerateAnswer:
    with parsing(f"{SERVICE}: the response from /generate is invalid"):
        return GenerateAnswer.model_validate_json(response.content)
