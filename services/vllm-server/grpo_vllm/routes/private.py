"""Routes that only the supervisor uses, over a private socket: the engine's status, and drain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from grpo_vllm.engine.vllm_compat.launch import generation_tokens
from grpo_vllm.http.in_flight import InFlight
from grpo_vllm.routes.errors import ErrorHandlingRoute
from grpo_vllm.routes.lora import AdapterControl, described
from grpo_vllm.weights.write_lease import WeightBridge


class DrainRequest(BaseModel):
    """`within_s`: the deadline for requests in flight."""

    model_config = ConfigDict(extra="forbid")

    within_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]


def engine_router(
    bridge: WeightBridge,
    in_flight: InFlight,
    adapters: AdapterControl,
    drain: Callable[[float], None],
) -> APIRouter:
    """`GET /engine/status` and `POST /engine/drain`. The engine ends after a drain."""
    router = APIRouter(prefix="/engine", route_class=ErrorHandlingRoute)

    @router.get("/status")
    async def get_status() -> dict[str, Any]:
        refusal = bridge.refusal()
        current = adapters.adapters.current if adapters.adapters else None
        return {
            "policy_version": list(bridge.version),
            "state": bridge.state.value,
            "reason": refusal.reason if refusal else "",
            "adapter": described(current) if current else None,
            "in_flight": len(in_flight),
            "generation_tokens": generation_tokens(),
        }

    @router.post("/drain")
    async def post_drain(request: DrainRequest) -> dict[str, str]:
        drain(request.within_s)
        return {"status": "draining"}

    return router
