"""Routes that report and change what the server serves: `/bridge/*`, `/lora/*`, `/engine/*`.

Pausing, sleeping and draining are offered to the trainer, the operator and the supervisor only; see
`grpo_vllm.engine.main`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import AliasChoices, BaseModel, Field

from grpo_core.tree.server import ServerSettings
from grpo_core.weights.bridge_config import BridgeConfig
from grpo_core.weights.directory_checks import (
    inside,
    require_complete,
    require_lora_tensors,
    require_servable_adapter,
)
from grpo_core.weights.ref import WeightKind
from grpo_core.weights.servers import EngineState
from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.engine.vllm_compat.launch import device_type, generation_tokens
from grpo_vllm.middleware import FollowGate, InFlight
from grpo_vllm.routes.errors import ErrorHandlingRoute, NotOffered, refusals
from grpo_vllm.weights.lora import AdapterSwitch
from grpo_vllm.weights.memory import dtype_name
from grpo_vllm.weights.write_lease import BridgeConflict, WeightBridge

PAUSE_BODY = (
    '{"session": ..., "lease_s": seconds, "policy_version": [epoch, step]}; the weight socket '
    "gives the attached trainer its session"
)
RESUME_BODY = '{"session": ..., "written": true or false}, sent by the session that paused'
LOAD_BODY = '{"adapter_path": directory below --weights-dir, "policy_version": [epoch, step]}'
UNLOAD_BODY = '{"adapter_name": name}'
NO_LORA = "this server cannot load adapters; start the server with --enable-lora"

AdapterName = Annotated[str, Field(validation_alias=AliasChoices("adapter_name", "lora_name"))]


class _Body(BaseModel, extra="forbid"):
    """Unknown fields are refused."""


class PauseRequest(_Body):
    session: str
    lease_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    policy_version: PolicyVersion


class ResumeRequest(_Body):
    session: str
    written: bool


class LoadRequest(_Body):
    """`policy_version`: names the adapter; default: the first version of the next epoch.
    `adapter_name`: accepted for the archived trainer, but not used; see `AdapterSwitch`."""

    adapter_path: Annotated[
        str, Field(min_length=1, validation_alias=AliasChoices("adapter_path", "lora_path"))
    ]
    adapter_name: AdapterName = ""
    policy_version: PolicyVersion | None = None


class UnloadRequest(_Body):
    adapter_name: AdapterName = ""


class NameRequest(_Body):
    """`policy_version`: a new name of the served weights."""

    policy_version: PolicyVersion


class UpdateRequest(NameRequest):
    """`directory`: verified by the supervisor, with all weights of the model, or an adapter."""

    directory: Path


class StatusRequest(_Body):
    """What the supervisor says with each query: see `FollowGate.note` and
    `EngineControl.join_group`."""

    behind: str = ""
    hold: bool = False
    head: str = ""
    staged: str = ""
    group: str = ""


class DrainRequest(_Body):
    """`within_s`: the deadline for requests in flight."""

    within_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]


def bridge_router(
    bridge: WeightBridge, settings: ServerSettings, why_no_sleep: str | None
) -> APIRouter:
    """The routes of `/bridge` that change the state. Args: why_no_sleep: the reason why the engine
    cannot sleep; None if it can"""
    refused = refusals(400, 409, 422, 503)
    router = APIRouter(prefix="/bridge", route_class=ErrorHandlingRoute, responses=refused)

    @router.post("/pause", summary=PAUSE_BODY)
    async def post_pause(request: PauseRequest, writing: bool = True) -> dict[str, Any]:
        lease_s = min(request.lease_s, settings.max_pause_lease_s)
        await bridge.pause(request.session, lease_s, request.policy_version, writing)
        return {"status": "paused", "lease_s": lease_s}

    @router.post("/resume", summary=RESUME_BODY)
    async def post_resume(request: ResumeRequest) -> dict[str, Any]:
        await bridge.resume(request.session, request.written)
        return {"status": "resumed", "policy_version": list(bridge.version)}

    @router.get("/is_paused")
    async def get_is_paused() -> dict[str, bool]:
        return {"paused": bridge.paused}

    @router.post("/notify_update")
    async def post_notify_update() -> dict[str, Any]:
        reset = await bridge.take_notice()
        return {
            "status": "ok",
            "notice_count": bridge.notice_count,
            "update_count": bridge.update_count,
            "policy_version": list(bridge.version),
            "prefix_cache_reset": reset,
        }

    def check_offered() -> None:
        if settings.share_weights:
            raise BridgeConflict(
                "sleeping would discard the memory that a trainer writes into; to use sleep, start "
                "the server without --share-weights"
            )
        if why_no_sleep is not None:
            raise NotOffered(f"the engine cannot sleep: {why_no_sleep}")

    @router.post("/sleep")
    async def post_sleep() -> dict[str, str]:
        check_offered()
        await bridge.engine.sleep()
        return {"status": "sleeping"}

    @router.post("/wake_up")
    async def post_wake_up() -> dict[str, str]:
        check_offered()
        await bridge.engine.wake_up()
        return {"status": "awake"}

    @router.get("/is_sleeping")
    async def get_is_sleeping() -> dict[str, bool]:
        return {"sleeping": bridge.engine.sleeping}

    return router


def lora_router(
    bridge: WeightBridge, adapters: AdapterSwitch | None, settings: ServerSettings
) -> APIRouter:
    """`POST /lora/load` and `POST /lora/unload`, also under vLLM's names."""
    refused = refusals(400, 409, 422, 503)
    router = APIRouter(route_class=ErrorHandlingRoute, responses=refused)

    def offered() -> AdapterSwitch:
        if adapters is None:
            raise NotOffered(NO_LORA)
        return adapters

    @router.post("/lora/load", summary=LOAD_BODY)
    @router.post("/v1/load_lora_adapter", summary=LOAD_BODY)
    async def load(request: LoadRequest) -> dict[str, Any]:
        switch, served = offered(), bridge.version
        directory = inside(request.adapter_path, settings.loads_from)
        require_complete(WeightKind.ADAPTER, directory)
        require_servable_adapter(directory, settings.max_lora_rank)
        require_lora_tensors(directory)
        version = request.policy_version or served.next_epoch()
        if version < served:
            raise BridgeConflict(
                f"policy version {tuple(version)} is older than the served version "
                f"{tuple(served)}; send a newer policy_version, or omit policy_version"
            )
        samples = not (bridge.paused or bridge.engine.sleeping)
        loaded = await switch.load(directory, version, probes=samples)
        if version > served:
            await bridge.adopt(version)
        return {"status": "ok", **loaded.described(), "in_use": switch.directories_in_use()}

    @router.post("/lora/unload", summary=UNLOAD_BODY)
    @router.post("/v1/unload_lora_adapter", summary=UNLOAD_BODY)
    async def unload(request: UnloadRequest) -> dict[str, Any]:
        switch = offered()
        current = switch.current
        if current is None:
            raise BridgeConflict("no adapter is loaded")
        if request.adapter_name not in ("", current.name, switch.served_name):
            raise BridgeConflict(f"adapter {request.adapter_name} is not loaded; {current.name} is")
        await switch.unload()
        # The server returns to the model during a run, so the version must be one that no trainer
        # has used.
        await bridge.adopt(bridge.version.next_epoch())
        return {"status": "ok", "policy_version": list(bridge.version)}

    return router


def info_router(
    engine: Any,
    bridge: WeightBridge,
    settings: ServerSettings,
    shared: BridgeConfig | None,
    adapters: AdapterSwitch | None,
    gate: FollowGate,
) -> APIRouter:
    """The routes of `/bridge` and `/lora` that only report. Args: shared: None without
    --share-weights"""
    router = APIRouter(route_class=ErrorHandlingRoute, responses=refusals())
    device, dtype = device_type(engine), dtype_name(engine.model_config.dtype)

    @router.get("/bridge/info")
    async def get_info() -> dict[str, Any]:
        refusal = bridge.refusal() or gate.refusal()
        adapter = adapters.current if adapters else None
        return {
            "name": settings.server_name,
            "head": gate.head or None,
            "staged": gate.staged or None,
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
            "state": state_of(bridge, gate).value,
            "state_reason": refusal.reason if refusal else None,
            "update_count": bridge.update_count,
            "notice_count": bridge.notice_count,
            "last_update_time": bridge.last_update_time,
        }

    @router.get("/bridge/state_dict_info")
    async def get_state_dict_info() -> dict[str, Any]:
        nothing: dict[str, Any] = {"total_bytes": None, "param_mappings": {}}
        return {
            "model": settings.model,
            "dtype": dtype,
            "shared_weights_enabled": shared is not None,
            **(shared.model_dump(mode="json") if shared else nothing),
        }

    @router.get("/lora/status")
    async def get_lora_status() -> dict[str, Any]:
        return {
            "lora_enabled": adapters is not None,
            "served_name": adapters.served_name if adapters else None,
            "policy_version": list(bridge.version),
            "adapter": adapters.current.described() if adapters and adapters.current else None,
            "in_use": adapters.directories_in_use() if adapters else [],
        }

    return router


def state_of(bridge: WeightBridge, gate: FollowGate) -> EngineState:
    is_open = bridge.refusal() is not None or gate.refusal() is None
    return bridge.state if is_open else EngineState.BEHIND


def engine_router(
    bridge: WeightBridge,
    settings: ServerSettings,
    facts: Mapping[str, str | int],
    in_flight: InFlight,
    adapters: AdapterSwitch | None,
    gate: FollowGate,
    drain: Callable[[float], None],
) -> APIRouter:
    """The supervisor's routes. The engine ends after a drain, and after an update that failed.
    Args: facts: `dtype`, `device` and `workers` of a `ServerStatus`"""
    router = APIRouter(prefix="/engine", route_class=ErrorHandlingRoute)

    @router.post("/status")
    async def post_status(request: StatusRequest) -> dict[str, Any]:
        gate.note(request.behind, request.hold, request.head, request.staged)
        await bridge.engine.join_group(request.group, settings.server_name, settings.staging)
        refusal = bridge.refusal()
        return {
            "policy_version": list(bridge.version),
            "state": state_of(bridge, gate).value,
            **facts,
            "in_use": adapters.directories_in_use() if adapters else [],
            "reason": refusal.reason if refusal else "",
            "adapter": adapters.current.described() if adapters and adapters.current else None,
            "in_flight": len(in_flight),
            "generation_tokens": generation_tokens(),
        }

    @router.post("/weights")
    async def post_weights(request: UpdateRequest) -> dict[str, Any]:
        directory, version = request.directory, request.policy_version
        if adapters is not None:
            await adapters.load(directory, version, probes=False)
            await bridge.adopt(version)
            return {"pause_s": 0.0, "in_use": adapters.directories_in_use()}
        if not bridge.engine.loads_weights:
            raise BridgeConflict("this version of vLLM cannot load weights while it runs")
        return {"pause_s": round(await bridge.update(directory, version), 3), "in_use": []}

    @router.post("/version")
    async def post_version(request: NameRequest) -> dict[str, str]:
        if adapters is not None:
            await adapters.rename(request.policy_version)
        await bridge.adopt(request.policy_version)
        return {"status": "ok"}

    @router.post("/drain")
    async def post_drain(request: DrainRequest) -> dict[str, str]:
        drain(request.within_s)
        return {"status": "draining"}

    return router
