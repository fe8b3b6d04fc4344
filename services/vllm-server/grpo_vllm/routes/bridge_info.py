"""Routes that report the served weights and their place in shared memory."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from grpo_core.weights.bridge_config import BridgeConfig
from grpo_vllm.engine.vllm_compat.launch import device_type
from grpo_vllm.routes.errors import ErrorHandlingRoute
from grpo_vllm.settings import ServerSettings
from grpo_vllm.weights.lora import AdapterSwitch
from grpo_vllm.weights.memory import dtype_name
from grpo_vllm.weights.write_lease import WeightBridge

Probe = Annotated[
    str,
    Query(
        pattern=r"^probe-[0-9a-f]{1,64}$",
        description="name of an empty file that the trainer has just created in the server's "
        "--weights-dir. The answer tells whether the server sees this file",
    ),
]


def bridge_info_router(
    engine: Any,
    bridge: WeightBridge,
    settings: ServerSettings,
    shared: BridgeConfig | None,
    adapters: AdapterSwitch | None,
) -> APIRouter:
    """`GET /bridge/info`, `GET /bridge/weights_dir` and `GET /bridge/state_dict_info`.

    Args:
        shared: None without --share-weights
    """
    router = APIRouter(prefix="/bridge", route_class=ErrorHandlingRoute)
    device, dtype = device_type(engine), dtype_name(engine.model_config.dtype)

    @router.get("/info")
    async def get_info() -> dict[str, Any]:
        refusal = bridge.refusal()
        adapter = adapters.current if adapters else None
        return {
            "enabled": shared is not None,
            "shared_weights": shared is not None,
            "model_name": settings.model,
            "dtype": dtype,
            "device": device,
            "max_model_len": engine.model_config.max_model_len,
            "kv_block_size": engine.vllm_config.cache_config.block_size,
            "lora_enabled": adapters is not None,
            "adapter": {"name": adapter.name, "path": str(adapter.directory)} if adapter else None,
            "run_id": settings.run_id if settings.redis else None,
            "weights_dir": None if shared else str(settings.loads_from.absolute()),
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

    @router.get("/weights_dir")
    async def get_weights_dir(probe: Probe) -> dict[str, bool]:
        return {"has_probe": (settings.loads_from / probe).exists()}

    @router.get("/state_dict_info")
    async def get_state_dict_info() -> dict[str, Any]:
        nothing: dict[str, Any] = {"total_bytes": None, "param_mappings": {}}
        described = shared.model_dump(mode="json") if shared else nothing
        return {
            "model": settings.model,
            "dtype": dtype,
            "shared_weights_enabled": shared is not None,
            **described,
        }

    return router
