"""Builds the engine's HTTP applications: the public port, the control port, the private socket."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from grpo_core.weights.bridge_config import BridgeConfig
from grpo_vllm.engine.vllm_compat.launch import (
    build_openai_app,
    resolve_adapters_with,
    why_no_sleep,
)
from grpo_vllm.http.in_flight import InFlight
from grpo_vllm.routes.bridge import bridge_control_router, bridge_info_router, engine_router
from grpo_vllm.routes.generation import generation_router
from grpo_vllm.routes.lora import AdapterControl, lora_router, lora_status_router
from grpo_vllm.settings import ServerSettings
from grpo_vllm.weights.lora import AdapterNames, AdapterSwitch
from grpo_vllm.weights.write_lease import WeightBridge


@dataclass(frozen=True)
class Serving:
    """The parts that an engine's routes use. `adapters`: None without --enable-lora."""

    settings: ServerSettings
    engine: Any
    bridge: WeightBridge
    in_flight: InFlight
    adapters: AdapterSwitch | None

    @property
    def adapter_control(self) -> AdapterControl:
        settings = self.settings
        return AdapterControl(
            self.bridge, self.adapters, settings.loads_from, settings.max_lora_rank
        )


async def public_app(
    serving: Serving, arguments: argparse.Namespace, shared: BridgeConfig | None
) -> FastAPI:
    """vLLM's application and our routes that generate or report. They change no weights."""
    engine, bridge, adapters = serving.engine, serving.bridge, serving.adapters
    app = await build_openai_app(engine, arguments)
    if adapters is not None:
        resolve_adapters_with(app, AdapterNames(adapters))
    routes = app.router.routes
    others = list(routes)
    app.include_router(generation_router(engine, bridge, adapters))
    # The first route that matches is used, and comparing with all of vLLM's takes 0.3 ms.
    routes[:] = [*routes[len(others) :], *others]
    app.include_router(bridge_info_router(engine, bridge, serving.settings, shared, adapters))
    app.include_router(lora_status_router(serving.adapter_control))
    return app


def control_app(serving: Serving) -> FastAPI:
    """Routes that change the server's state, for the trainer and the operator."""
    app = FastAPI(title="vllm-server control")
    include_control(app, serving)
    return app


def private_app(serving: Serving, drain: Callable[[float], None]) -> FastAPI:
    """Routes for the supervisor."""
    app = FastAPI(title="vllm-server engine process")
    app.include_router(engine_router(serving.bridge, serving.in_flight, serving.adapters, drain))
    app.include_router(lora_router(serving.adapter_control))
    return app


def include_control(app: FastAPI, serving: Serving) -> None:
    obstacle = why_no_sleep(serving.engine)
    app.include_router(bridge_control_router(serving.bridge, serving.settings, obstacle))
    app.include_router(lora_router(serving.adapter_control))
