"""Routes that change the server's state: pause, resume, update notice, sleep and wake up."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.routes.errors import ErrorHandlingRoute, NotOffered
from grpo_vllm.settings import ServerSettings
from grpo_vllm.weights.write_lease import BridgeConflict, WeightBridge

PAUSE_BODY = (
    '{"session": ..., "lease_s": seconds, "policy_version": [epoch, step]}; the weight socket '
    "gives the attached trainer its session"
)
RESUME_BODY = '{"session": ..., "written": true or false}, sent by the session that paused'


class PauseRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    session: str
    lease_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    policy_version: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]


class ResumeRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    session: str
    written: bool


def bridge_control_router(
    bridge: WeightBridge, settings: ServerSettings, why_no_sleep: str | None
) -> APIRouter:
    """Args:
    why_no_sleep: the reason why the engine cannot sleep; None if it can
    """
    router = APIRouter(prefix="/bridge", route_class=ErrorHandlingRoute)

    @router.post("/pause", summary=PAUSE_BODY)
    async def post_pause(request: PauseRequest) -> dict[str, Any]:
        lease_s = min(request.lease_s, settings.max_pause_lease_s)
        await bridge.pause(request.session, lease_s, PolicyVersion(*request.policy_version))
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
