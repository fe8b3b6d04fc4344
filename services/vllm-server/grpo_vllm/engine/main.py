"""Runs the engine: starts vLLM, builds the applications and serves until it is stopped."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import structlog
from fastapi import FastAPI
from starlette.types import ASGIApp

from grpo_core.errors import GrpoError
from grpo_core.security.same_site import SameSiteOnly, listed
from grpo_core.weights.bridge_config import BridgeConfig
from grpo_core.weights.ref import WeightKind, WeightRef
from grpo_vllm.engine.args import parsed_engine_arguments
from grpo_vllm.engine.control import FINISHED_FIRST_TOKENS, EngineControl
from grpo_vllm.engine.vllm_compat.launch import (
    build_openai_app,
    device_type,
    open_engine,
    resolve_adapters_with,
    why_no_sleep,
)
from grpo_vllm.engine_protocol import EngineEnd, EnginePlan
from grpo_vllm.http.middleware import InFlight, ReadinessGate
from grpo_vllm.http.server import DrainingServer, require_api_key, serve_until
from grpo_vllm.routes.control import (
    AdapterControl,
    bridge_control_router,
    bridge_info_router,
    engine_router,
    lora_router,
    lora_status_router,
)
from grpo_vllm.routes.generation import generation_router
from grpo_vllm.settings import ServerSettings
from grpo_vllm.weights.lora import AdapterNames, AdapterSwitch
from grpo_vllm.weights.memory import dtype_name
from grpo_vllm.weights.served_store import (
    InitialWeights,
    RedisServedStore,
    ServedStore,
    ServedWeights,
    initial_weights_after,
)
from grpo_vllm.weights.socket_server import (
    bridge_config_written,
    exported_by_worker,
    serve_weights,
)
from grpo_vllm.weights.write_lease import WeightBridge

log = structlog.get_logger()


class EngineDied(GrpoError):
    """The engine ended or stopped answering while the server was running."""


def run(settings: ServerSettings, plan: EnginePlan) -> None:
    """Serve until drained, SIGTERM or SIGINT. Raises `EngineDied` if the engine ends first."""
    # vLLM starts inside a blocking call. Until the event loop handles signals, SIGTERM must unwind
    # the stack. Otherwise vLLM's processes would outlive this one.
    signal.signal(signal.SIGTERM, _unwind)
    asyncio.run(_serve(settings, plan))


def _unwind(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


async def _serve(settings: ServerSettings, plan: EnginePlan) -> None:
    arguments = parsed_engine_arguments(settings, plan.weights)
    channel = EngineEnd(plan.channel)
    async with contextlib.AsyncExitStack() as stack:
        store = await _open_store(settings, stack)
        served = await store.read(settings.redis_deadline_s)
        engine = await stack.enter_async_context(open_engine(arguments))
        initial = _initial_weights(settings, plan.weights, served)
        bridge = await _begin(settings, engine, initial, store)
        in_flight = InFlight(on_dropped=channel.dropped)
        adapters = await _adapters(settings, engine, arguments, in_flight, plan.weights)
        serving = Serving(settings, engine, bridge, in_flight, adapters)
        shared = await stack.enter_async_context(_sharing(settings, engine, bridge))
        app = await public_app(serving, arguments, shared)
        if plan.control is None and settings.public_is_loopback:
            include_control(app, serving)
        gated = ReadinessGate(
            functools.partial(in_flight.pass_on, app),
            bridge.refusal,
            bridge.write_back.wait,
            settings.write_back_hold_s,
        )
        pages = frozenset(arguments.allowed_origins) - {"*"}  # "*" is vLLM's default
        public = DrainingServer(_guarded(gated, settings, pages))
        app.state.server = public  # vLLM's error handler stops this server if the engine is dead

        def drain(within_s: float) -> None:
            public.drain(within_s, channel.park, in_flight)

        servers = {public: plan.public, DrainingServer(private_app(serving, drain)): plan.private}
        if plan.control is not None:
            servers[DrainingServer(_guarded(control_app(serving), settings))] = plan.control
        log.info(
            "engine.serving",
            host=settings.host,
            port=settings.port,
            model=str(plan.weights.checkpoint or settings.model),
            policy_version=tuple(bridge.version),
        )
        arrival = asyncio.create_task(_arrive(public, plan.parked, channel))
        await serve_until(lambda: engine.errored or bridge.engine.broken, servers)
        await arrival
        if engine.errored:
            raise EngineDied("a process of vLLM ended; its last lines in this log give the cause")
        if bridge.engine.broken:
            raise EngineDied("the engine did not resume after a pause; the supervisor restarts it")


async def _arrive(server: DrainingServer, parked: tuple[int, ...], channel: EngineEnd) -> None:
    await server.adopt(parked)
    channel.serving()


def _guarded(
    app: ASGIApp, settings: ServerSettings, pages: frozenset[str] = frozenset()
) -> ASGIApp:
    """`app` that requires the API key, and refuses browser pages of sites not in `pages`."""
    guarded = require_api_key(app, settings.api_key)
    return SameSiteOnly(guarded, pages, listed(settings.allowed_hosts))


async def _open_store(settings: ServerSettings, stack: contextlib.AsyncExitStack) -> ServedStore:
    """The record of weights that a trainer writes in place. Other weights come with the plan."""
    if settings.redis is None or not settings.share_weights:
        return ServedStore()
    return await stack.enter_async_context(
        RedisServedStore(settings.redis, settings.run_id, settings.redis_required)
    )


def _initial_weights(
    settings: ServerSettings, weights: WeightRef, served: ServedWeights | None
) -> InitialWeights:
    if not settings.share_weights:
        return InitialWeights(weights.version)
    if served is None and weights.kind is WeightKind.MEMORY:
        # Without Redis only the supervisor remembers the served version.
        served = ServedWeights(weights, intact=False)
    return initial_weights_after(served, settings.await_weights)


async def _begin(
    settings: ServerSettings, engine: Any, initial: InitialWeights, store: ServedStore
) -> WeightBridge:
    short = FINISHED_FIRST_TOKENS if device_type(engine) == "cpu" else 0
    control = EngineControl(engine, settings.share_weights, short)
    bridge = WeightBridge(control, initial.version, store)
    await bridge.engine.name_weights(bridge.version)
    if initial.new_name:
        await store.save(ServedWeights(WeightRef(version=bridge.version)))
    if initial.missing:
        bridge.write_back.begin(bridge.version, settings.write_back_deadline_s)
    return bridge


async def _adapters(
    settings: ServerSettings,
    engine: Any,
    arguments: argparse.Namespace,
    in_flight: InFlight,
    weights: WeightRef,
) -> AdapterSwitch | None:
    """Raises `AdapterRefused` if the engine cannot load the adapter that it must serve."""
    if not settings.enable_lora:
        return None
    adapters = AdapterSwitch(engine, arguments.served_model_name[0], in_flight)
    if weights.adapter is not None:
        await adapters.load(weights.adapter, weights.version)
    return adapters


@contextlib.asynccontextmanager
async def _sharing(
    settings: ServerSettings, engine: Any, bridge: WeightBridge
) -> AsyncIterator[BridgeConfig | None]:
    """Trainers can attach while the context is open. Yields None without --share-weights."""
    if not settings.share_weights:
        yield None
        return
    weights = await exported_by_worker(engine)
    config = BridgeConfig(
        model=settings.model,
        dtype=dtype_name(engine.model_config.dtype),
        generation=weights.manifest.generation,
        weights_socket=settings.socket_path.absolute(),
        total_bytes=weights.manifest.total_bytes,
        device=device_type(engine),
        param_mappings=weights.manifest.parameters,
    )
    async with serve_weights(settings.socket_path, weights, bridge):
        with bridge_config_written(
            config, settings.bridge_config_file, required=settings.bridge_config_required
        ):
            log.info(
                "weights.shared",
                socket=str(settings.socket_path),
                generation=config.generation,
                megabytes=round(config.total_bytes / 1e6, 1),
                parameters=len(config.param_mappings),
            )
            yield config


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
