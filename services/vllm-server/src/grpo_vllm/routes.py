"""HTTP on top of generation and bridge: handlers parse, call, reply."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field

from grpo_core.weight_manifest import WeightManifest
from grpo_core.wire import PolicyVersion
from grpo_vllm.bridge import BridgeConflict, BridgeTimeout, WeightBridge
from grpo_vllm.generation import (
    BadGenerateRequest,
    GenerationFailed,
    generate,
    parse_generate_request,
)

CLIENT_CLOSED_REQUEST = 499


@dataclass(frozen=True)
class SharedWeights:
    """What `/bridge/*` tells about the weights that trainers can map."""

    manifest: WeightManifest
    socket: Path


class AnsweringRoute(APIRoute):
    """Answers our own errors itself: what vLLM's handlers make of them differs by version."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except BadGenerateRequest as error:
                return JSONResponse({"detail": str(error)}, 400)
            except BridgeConflict as error:
                return JSONResponse({"detail": str(error)}, 409)
            except (BridgeTimeout, GenerationFailed) as error:
                return JSONResponse({"detail": str(error)}, 503, {"retry-after": "1"})

        return answer


class PauseRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    session: str
    lease_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    policy_version: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]


class ResumeRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    session: str
    written: bool


def public_router(engine: Any, bridge: WeightBridge, shared: SharedWeights | None) -> APIRouter:
    """Routes that anyone may call: generation and facts."""
    router = APIRouter(route_class=AnsweringRoute)

    @router.post("/generate")
    async def post_generate(request: Request) -> Response:
        body = await _json_body(request)
        parsed = parse_generate_request(body, engine.model_config, engine.get_tokenizer())
        work = asyncio.create_task(generate(engine, parsed, lambda: bridge.version))
        answer = await _unless_disconnected(request, work)
        if answer is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return Response(
            orjson.dumps(answer, option=orjson.OPT_NON_STR_KEYS), media_type="application/json"
        )

    @router.get("/bridge/info")
    async def get_info() -> dict[str, Any]:
        return {
            "enabled": shared is not None,
            "shared_weights": shared is not None,
            "model_name": engine.model_config.model,
            "device": engine.vllm_config.device_config.device_type,
            "generation": shared.manifest.generation if shared else None,
            "weights_socket": str(shared.socket) if shared else None,
            "policy_version": list(bridge.version),
            "weights_intact": bridge.weights_intact,
            "paused": bridge.paused,
            "update_count": bridge.update_count,
            "last_update_time": bridge.last_update_time,
        }

    @router.get("/bridge/state_dict_info")
    async def get_state_dict_info() -> dict[str, Any]:
        return {
            "model": engine.model_config.model,
            "dtype": str(engine.model_config.dtype),
            "shared_weights_enabled": shared is not None,
            "total_bytes": shared.manifest.total_bytes if shared else None,
            "param_mappings": {
                name: region.model_dump() for name, region in shared.manifest.parameters.items()
            }
            if shared
            else {},
        }

    return router


def control_router(bridge: WeightBridge, max_lease_s: float) -> APIRouter:
    """Routes that change state: for the trainer alone."""
    router = APIRouter(prefix="/bridge", route_class=AnsweringRoute)

    @router.post("/pause")
    async def post_pause(request: PauseRequest) -> dict[str, Any]:
        lease_s = min(request.lease_s, max_lease_s)
        await bridge.pause(request.session, lease_s, PolicyVersion(*request.policy_version))
        return {"status": "paused", "lease_s": lease_s}

    @router.post("/resume")
    async def post_resume(request: ResumeRequest) -> dict[str, Any]:
        await bridge.resume(request.session, request.written)
        return {"status": "resumed", "policy_version": list(bridge.version)}

    @router.get("/is_paused")
    async def get_is_paused() -> dict[str, bool]:
        return {"paused": bridge.paused}

    return router


async def _json_body(request: Request) -> Any:
    try:
        return json.loads(await request.body(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadGenerateRequest(f"body: not valid JSON: {error}") from error


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


async def _unless_disconnected(
    request: Request, work: asyncio.Task[dict[str, Any]]
) -> dict[str, Any] | None:
    """The work's result; None, with the work cancelled, once the client has gone."""
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        return None
    finally:
        gone.cancel()
        work.cancel()


async def _disconnected(request: Request) -> None:
    # The body has been read, so the next message can only be the end of the connection.
    while (await request.receive())["type"] != "http.disconnect":
        pass
