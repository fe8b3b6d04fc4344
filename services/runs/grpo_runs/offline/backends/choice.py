"""Asks the server what it can do, and chooses how new weights reach it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grpo_core.clients.inference import BridgeInfo
from grpo_core.clients.service import ServiceClient
from grpo_core.errors import RequestRefused
from grpo_core.tree.weights import ModeName
from grpo_runs.offline.errors import ServerUnsuitable
from grpo_runs.offline.keys import OfflineKeys

_DEADLINE_S, _REQUEST_S = 60.0, 30.0
_NO_ROUTE = (404, 405)


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
        ServerUnsuitable: the server has no way to take new weights that `sync.mode` names.
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
    """
    hint = "start the server, or check generation.base_url"
    client = ServiceClient("inference server", url, _DEADLINE_S, _REQUEST_S, None, hint)
    try:
        return BridgeInfo.model_validate_json(client.send("GET", "/bridge/info").content)
    except RequestRefused as error:
        if error.status in _NO_ROUTE:
            return None
        raise
    finally:
        client.close()


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
