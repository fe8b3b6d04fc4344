"""Facts about the served weights, for anyone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter

from grpo_core.weights.bridge_config import BridgeConfig
from grpo_vllm.routes.errors import ErrorHandlingRoute
from grpo_vllm.weights.lora import AdapterSwitch
from grpo_vllm.weights.write_lease import WeightBridge


@dataclass(frozen=True)
class ServedModel:
    """What does not change while the server runs. `shared`: None where nothing is shared.

    `max_model_len`: tokens of a prompt and its completion; `kv_block_size`: tokens whose keys and
    values are cached together."""

    name: str
    dtype: str
    device: str
    shared: BridgeConfig | None
    max_model_len: int = 0
    kv_block_size: int = 0


def bridge_info_router(
    bridge: WeightBridge, model: ServedModel, adapters: AdapterSwitch | None = None
) -> APIRouter:
    """`GET /bridge/info` and `GET /bridge/state_dict_info`."""
    router = APIRouter(prefix="/bridge", route_class=ErrorHandlingRoute)
    shared = model.shared

    @router.get("/info")
    async def get_info() -> dict[str, Any]:
        refusal = bridge.refusal()
        adapter = adapters.current if adapters else None
        return {
            "enabled": shared is not None,
            "shared_weights": shared is not None,
            "model_name": model.name,
            "dtype": model.dtype,
            "device": model.device,
            "max_model_len": model.max_model_len,
            "kv_block_size": model.kv_block_size,
            "lora_enabled": adapters is not None,
            "adapter": {"name": adapter.name, "path": str(adapter.directory)} if adapter else None,
            "generation": shared.generation if shared else None,
            "weights_socket": str(shared.weights_socket) if shared else None,
            "policy_version": list(bridge.version),
            "weights_intact": bridge.weights_intact,
            "paused": bridge.paused,
            "state": bridge.state.value,
            "state_reason": refusal.reason if refusal else None,
            "update_count": bridge.update_count,
            "notice_count": bridge.notice_count,
            "last_update_time": bridge.last_update_time,
        }

    @router.get("/state_dict_info")
    async def get_state_dict_info() -> dict[str, Any]:
        nothing: dict[str, Any] = {"total_bytes": None, "param_mappings": {}}
        described = shared.model_dump(mode="json") if shared else nothing
        return {
            "model": model.name,
            "dtype": model.dtype,
            "shared_weights_enabled": shared is not None,
            **described,
        }

    return router
