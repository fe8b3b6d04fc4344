"""Asks the server what it can do and how new weights reach it, and samples from stock vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from grpo_core.clients.inference import BridgeInfo, GenerateAnswer
from grpo_core.clients.service import AsyncServiceClient, ServiceClient
from grpo_core.errors import ProtocolViolation, RequestRefused, parsing
from grpo_core.tree.weights import ModeName
from grpo_core.wire.policy_version import PolicyVersion
from grpo_env.inference.server import Home
from grpo_runs.offline.errors import ServerUnsuitable
from grpo_runs.offline.keys import OfflineKeys

_DEADLINE_S, _REQUEST_S = 60.0, 30.0
_NO_ROUTE = (404, 405)
_SERVICE = "vLLM"
_UNTRAINED = PolicyVersion(0, 0)
_NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Otherwise vLLM takes the model's own values."""


@dataclass(frozen=True)
class Sampling:
    """How an iteration samples and publishes.

    server: the program that samples. `local`: none, the trainer samples by itself.
    mode: of the weights; frozen: they stay in the trainer.
    """

    server: Literal["ours", "stock_vllm", "sglang", "local"]
    mode: ModeName | Literal["frozen", "sglang", "local"]

    @property
    def trainer_mode(self) -> ModeName:
        """The mode whose options the trainer has."""
        if self.mode in ("frozen", "sglang", "local"):
            return "none"
        return self.mode  # type: ignore[return-value]

    @property
    def is_frozen(self) -> bool:
        return self.mode == "frozen"


def choose(keys: OfflineKeys) -> Sampling:
    """How this run samples and publishes.

    Raises:
        ServiceUnavailable: no server answers.
        ServerUnsuitable: the server has no way to take new weights that `sync.mode` names, or is
            none of these servers.
    """
    wanted, backend = keys.sync.mode, keys.generation.backend
    if backend == "local":
        _require(wanted == "auto", keys, "generation.backend=local has no server")
        return Sampling("local", "local")
    if backend == "sglang_server":
        _require(wanted in ("auto", "frozen"), keys, "SGLang takes weights in its own way")
        return Sampling("sglang", "frozen" if wanted == "frozen" else "sglang")
    info = bridge_info(keys.generation.base_url)
    if info is None:
        _require(
            wanted in ("auto", "frozen"), keys, "stock vLLM takes no weights (no /bridge/info)"
        )
        return Sampling("stock_vllm", "frozen")
    return Sampling("ours", _mode_of(info) if wanted == "auto" else wanted)


def bridge_info(url: str) -> BridgeInfo | None:
    """What a vllm-api-server says of itself; None if it is another vLLM server.

    Raises:
        ServiceUnavailable: no server answers.
        ServerUnsuitable: another program answers.
    """
    hint = "start the server, or check generation.base_url"
    with ServiceClient("inference server", url, _DEADLINE_S, _REQUEST_S, None, hint) as client:
        try:
            return BridgeInfo.model_validate_json(client.send("GET", "/bridge/info").content)
        except RequestRefused as error:
            if error.status not in _NO_ROUTE:
                raise
            if _has_openai_api(client):
                return None
        except ValidationError:
            pass  # it has an answer to every path
    raise ServerUnsuitable(
        f"{client.base_url} is no vLLM, SGLang or OpenAI API; check generation.base_url"
    )


def _has_openai_api(client: ServiceClient) -> bool:
    try:
        client.send("GET", "/v1/models")
    except RequestRefused as error:
        return error.status not in _NO_ROUTE  # others ask for a key
    return True


def _mode_of(info: BridgeInfo) -> ModeName:
    if info.weights_socket is not None:
        return "shared_vllm"
    return "lora_only" if info.lora_enabled else "none"


def _require(is_possible: bool, keys: OfflineKeys, reason: str) -> None:
    if not is_possible:
        raise ServerUnsuitable(
            f"sync.mode={keys.sync.mode}: {reason}; leave sync.mode out, or start vllm-api-server "
            f"at {keys.generation.base_url} and set generation.backend=vllm_server"
        )


class _Choice(BaseModel):
    text: str
    finish_reason: str | None
    token_ids: list[int] | None = None


class _Answer(BaseModel):
    choices: list[_Choice]


class StockVllm(AsyncServiceClient):
    """Samples completions. Its logprobs are placeholders: vLLM logs them before the temperature.

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

    async def generate(
        self,
        prompt_token_ids: list[int],
        home: Home | None = None,  # noqa: ARG002 - there is one server
        **sampling: Any,
    ) -> GenerateAnswer:
        """Raises `RequestRefused`, `ServiceUnavailable`, `ProtocolViolation`."""
        body = {
            "model": self._model,
            "prompt": prompt_token_ids,
            "return_token_ids": True,
            **_NEUTRAL,
            **sampling,
        }
        response = await self.send("POST", "/v1/completions", json=body)
        where = f"{_SERVICE} at {self.base_url}"
        with parsing(f"{where}: the response from /v1/completions is invalid"):
            choices = _Answer.model_validate_json(response.content).choices
        rows = [choice.token_ids or [] for choice in choices]
        if not all(rows):
            raise ProtocolViolation(
                f"{where} returns no token ids; use vLLM 0.10.2 or later, or vllm-api-server"
            )
        return GenerateAnswer(
            text=[choice.text for choice in choices],
            prompt="",
            finish_reasons=[choice.finish_reason or "abort" for choice in choices],
            logprobs=[[[{token: 0.0}] for token in row] for row in rows],
            prompt_token_ids=prompt_token_ids,
            token_ids=rows,
            policy_version=[(_UNTRAINED, _UNTRAINED)] * len(rows),
        )
