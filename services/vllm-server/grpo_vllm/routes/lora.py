"""Routes that load and unload LoRA adapters, for the operator and the supervisor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from grpo_core.weights.directory_checks import inside, require_complete, require_servable_adapter
from grpo_core.weights.ref import WeightKind
from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.routes.errors import ErrorHandlingRoute, NotOffered
from grpo_vllm.weights.lora import AdapterSwitch, LoadedAdapter
from grpo_vllm.weights.write_lease import BridgeConflict, WeightBridge

LOAD_BODY = '{"adapter_path": directory below --weights-dir, "policy_version": [epoch, step]}'
UNLOAD_BODY = '{"adapter_name": name}'
NO_LORA = "this server cannot load adapters; start the server with --enable-lora"


class LoadRequest(BaseModel):
    """`policy_version`: names the adapter; default: the first version of the next epoch.
    `adapter_name`: accepted for the archived trainer, but not used; see `AdapterSwitch`."""

    model_config = ConfigDict(extra="forbid")

    adapter_path: Annotated[
        str, Field(min_length=1, validation_alias=AliasChoices("adapter_path", "lora_path"))
    ]
    adapter_name: Annotated[
        str, Field(validation_alias=AliasChoices("adapter_name", "lora_name"))
    ] = ""
    policy_version: PolicyVersion | None = None


class UnloadRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    adapter_name: Annotated[
        str, Field(validation_alias=AliasChoices("adapter_name", "lora_name"))
    ] = ""


@dataclass(frozen=True)
class AdapterControl:
    """The parts that the routes use. `weights_dir`: every adapter must be below this directory."""

    bridge: WeightBridge
    adapters: AdapterSwitch | None
    weights_dir: Path
    max_rank: int

    def switch(self) -> AdapterSwitch:
        if self.adapters is None:
            raise NotOffered(NO_LORA)
        return self.adapters

    async def load(self, request: LoadRequest) -> LoadedAdapter:
        switch = self.switch()
        directory = inside(request.adapter_path, self.weights_dir)
        require_complete(WeightKind.ADAPTER, directory)
        require_servable_adapter(directory, self.max_rank)
        served = self.bridge.version
        version = request.policy_version or served.next_epoch()
        if version < served:
            raise BridgeConflict(
                f"policy version {tuple(version)} is older than the served version "
                f"{tuple(served)}; send a newer policy_version, or omit policy_version"
            )
        loaded = await switch.load(directory, version)
        if version > served:
            await self.bridge.adopt(version)
        return loaded

    async def unload(self, request: UnloadRequest) -> None:
        switch = self.switch()
        current = switch.current
        if current is None:
            raise BridgeConflict("no adapter is loaded")
        if request.adapter_name not in ("", current.name, switch.served_name):
            raise BridgeConflict(
                f"adapter {request.adapter_name} is not loaded; the loaded adapter is "
                f"{current.name}"
            )
        await switch.unload()
        # The server returns to the model during a run, so the version must be one that no trainer
        # has used.
        await self.bridge.adopt(self.bridge.version.next_epoch())


def lora_router(control: AdapterControl) -> APIRouter:
    """`POST /lora/load` and `POST /lora/unload`, also under vLLM's names."""
    router = APIRouter(route_class=ErrorHandlingRoute)

    @router.post("/lora/load", summary=LOAD_BODY)
    @router.post("/v1/load_lora_adapter", summary=LOAD_BODY)
    async def load(request: LoadRequest) -> dict[str, Any]:
        loaded = await control.load(request)
        return {"status": "ok", **described(loaded), **_in_use(control)}

    @router.post("/lora/unload", summary=UNLOAD_BODY)
    @router.post("/v1/unload_lora_adapter", summary=UNLOAD_BODY)
    async def unload(request: UnloadRequest) -> dict[str, Any]:
        await control.unload(request)
        return {"status": "ok", "policy_version": list(control.bridge.version)}

    return router


def lora_status_router(control: AdapterControl) -> APIRouter:
    """`GET /lora/status`."""
    router = APIRouter(route_class=ErrorHandlingRoute)

    @router.get("/lora/status")
    async def get_status() -> dict[str, Any]:
        adapters = control.adapters
        current = adapters.current if adapters else None
        return {
            "lora_enabled": adapters is not None,
            "served_name": adapters.served_name if adapters else None,
            "policy_version": list(control.bridge.version),
            "adapter": described(current) if current else None,
            **_in_use(control),
        }

    return router


def described(adapter: LoadedAdapter) -> dict[str, Any]:
    return {
        "adapter_name": adapter.name,
        "adapter_path": str(adapter.directory),
        "policy_version": list(adapter.version),
    }


def _in_use(control: AdapterControl) -> dict[str, list[str]]:
    used = control.adapters.in_use() if control.adapters else []
    return {"in_use": [str(adapter.directory) for adapter in used]}
