"""The two applications: vLLM's with our routes beside its own, and the one of the control port."""

from __future__ import annotations

import argparse
from typing import Any

from fastapi import FastAPI

from grpo_core.bridge_config import BridgeConfig
from grpo_vllm.arena import dtype_name
from grpo_vllm.bridge import WeightBridge
from grpo_vllm.engine_internals import build_openai_app, device_type, why_no_sleep
from grpo_vllm.routes.bridge_control import bridge_control_router, sleep_router
from grpo_vllm.routes.bridge_facts import ServedModel, bridge_facts_router
from grpo_vllm.routes.generation import generation_router
from grpo_vllm.settings import ServerSettings


async def public_app(
    engine: Any, arguments: argparse.Namespace, bridge: WeightBridge, shared: BridgeConfig | None
) -> FastAPI:
    """Generation and facts, for anyone."""
    app = await build_openai_app(engine, arguments)
    model = ServedModel(
        name=engine.model_config.model,
        dtype=dtype_name(engine.model_config.dtype),
        device=device_type(engine),
        shared=shared,
    )
    app.include_router(generation_router(engine, bridge))
    app.include_router(bridge_facts_router(bridge, model))
    return app


def control_app(settings: ServerSettings, engine: Any, bridge: WeightBridge) -> FastAPI:
    """What changes state, and nothing else."""
    app = FastAPI(title="vllm-server control")
    include_control(app, settings, engine, bridge)
    return app


def include_control(
    app: FastAPI, settings: ServerSettings, engine: Any, bridge: WeightBridge
) -> None:
    app.include_router(bridge_control_router(bridge, settings.max_pause_lease_s))
    app.include_router(sleep_router(bridge, settings.share_weights, why_no_sleep(engine)))
