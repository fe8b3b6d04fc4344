"""Runs the engine: starts vLLM, builds the applications and serves until it is stopped.

The public port generates and reports, the control port changes what is served, for the trainer and
the operator, and the private socket is for the supervisor.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import structlog
from fastapi import APIRouter, FastAPI
from starlette.types import ASGIApp

from grpo_core.errors import GrpoError
from grpo_core.security import SameSiteOnly
from grpo_core.tree.server import ServerSettings
from grpo_core.weights.bridge_config import BridgeConfig
from grpo_vllm.engine.args import parsed_engine_arguments
from grpo_vllm.engine.control import FINISHED_FIRST_TOKENS, EngineControl
from grpo_vllm.engine.vllm_compat.launch import (
    build_openai_app,
    can_update_weights,
    device_type,
    open_engine,
    resolve_adapters_with,
    why_no_sleep,
)
from grpo_vllm.engine.vllm_compat.requests import STAMPS_VERSIONS
from grpo_vllm.engine_protocol import EngineEnd, EnginePlan
from grpo_vllm.http_server import DrainingServer, require_api_key, serve_until
from grpo_vllm.middleware import FollowGate, InFlight, ReadinessGate
from grpo_vllm.routes.control import bridge_router, engine_router, info_router, lora_router
from grpo_vllm.routes.generation import generation_router
from grpo_vllm.weights.lora import AdapterNames, AdapterSwitch
from grpo_vllm.weights.memory import dtype_name
from grpo_vllm.weights.served_store import RedisServedStore, ServedStore
from grpo_vllm.weights.socket_server import bridge_config_written, exported_by_worker, serve_weights
from grpo_vllm.weights.write_lease import WeightBridge, bridge_at_start

log = structlog.get_logger()


class EngineDied(GrpoError):
    """The engine ended or stopped answering while the server was running."""


def run(settings: ServerSettings, plan: EnginePlan) -> None:
    """Serve until drained, SIGTERM or SIGINT. Raises `EngineDied` if the engine ends first."""
    # vLLM starts inside a blocking call. Until the event loop handles signals, SIGTERM must unwind
    # the stack. Otherwise vLLM's processes would outlive this one.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    asyncio.run(_serve(settings, plan))


async def _serve(settings: ServerSettings, plan: EnginePlan) -> None:
    arguments = parsed_engine_arguments(settings, plan.weights)
    channel = EngineEnd(plan.channel)
    async with contextlib.AsyncExitStack() as stack:
        store = ServedStore()
        if settings.redis is not None and settings.share_weights:  # other weights are in the plan
            store = await stack.enter_async_context(
                RedisServedStore(settings.redis, settings.run_id, settings.redis_required)
            )
        served = await store.read(settings.redis_deadline_s)
        engine = await stack.enter_async_context(open_engine(arguments))
        weights = served.weights if served is not None else plan.weights
        engine_control = EngineControl(
            engine,
            settings.share_weights,
            FINISHED_FIRST_TOKENS if device_type(engine) == "cpu" else 0,
            stamps_versions=STAMPS_VERSIONS,
            loads_weights=can_update_weights(),
        )
        bridge = await bridge_at_start(engine_control, settings, weights, store)
        in_flight = InFlight(on_dropped=channel.dropped)
        # Not while a trainer writes: they go on soon.
        bridge.write_back.on_overdue = lambda: None if bridge.paused else in_flight.give_up_all()
        adapters = None
        if settings.enable_lora:
            adapters = AdapterSwitch(engine, arguments.served_model_name[0], in_flight)
            if plan.weights.adapter is not None:
                await adapters.load(plan.weights.adapter, plan.weights.version)
        shared = await stack.enter_async_context(_sharing(settings, engine, bridge))
        app = await _public_app(engine, arguments, bridge, adapters)
        gate = FollowGate(settings.follows)
        app.include_router(info_router(engine, bridge, settings, shared, adapters, gate))
        lora = lora_router(bridge, adapters, settings)
        control = (bridge_router(bridge, settings, why_no_sleep(engine)), lora)
        servers = {}
        if plan.control is not None:
            apart = _app("vllm-server control", *control)
            servers[DrainingServer(_guarded(apart, settings))] = plan.control
        elif settings.public_is_loopback:
            for router in control:
                app.include_router(router)
        counted = functools.partial(in_flight.pass_on, app)
        wait = gate.wait if settings.follows else bridge.write_back.wait
        hold = (lambda: bridge.refusal() or gate.refusal(), wait, settings.write_back_hold_s)
        pages = frozenset(arguments.allowed_origins) - {"*"}  # "*" is vLLM's default
        public = DrainingServer(_guarded(ReadinessGate(counted, *hold), settings, pages))
        app.state.server = public  # vLLM's error handler stops this server if the engine is dead
        drain = functools.partial(public.drain, park=channel.park, in_flight=in_flight)
        facts = _facts(engine, bridge.engine.loads_weights)
        status = engine_router(bridge, settings, facts, in_flight, adapters, gate, drain)
        private = DrainingServer(_app("vllm-server engine process", status))
        servers |= {public: plan.public, private: plan.private}
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
            raise EngineDied("the engine failed in a pause or at loading weights, and is restarted")


def _facts(engine: Any, loads_weights: bool) -> dict[str, str | int]:
    parallel = engine.vllm_config.parallel_config
    # Its workers fill one directory. Ray's may be on several hosts.
    is_one_host = parallel.nnodes == 1 and parallel.distributed_executor_backend != "ray"
    can_join = loads_weights and parallel.data_parallel_size == 1 and is_one_host
    return {
        "dtype": dtype_name(engine.model_config.dtype),
        "device": device_type(engine),
        "workers": parallel.world_size if can_join else 0,
    }


async def _public_app(
    engine: Any, arguments: argparse.Namespace, bridge: WeightBridge, adapters: AdapterSwitch | None
) -> FastAPI:
    """vLLM's application with our routes that generate."""
    app = await build_openai_app(engine, arguments)
    if adapters is not None:
        resolve_adapters_with(app, AdapterNames(adapters))
    routes = app.router.routes
    others = list(routes)
    app.include_router(generation_router(engine, bridge, adapters))
    # The first route that matches is used, and comparing with all of vLLM's takes 0.3 ms.
    routes[:] = [*routes[len(others) :], *others]
    return app


def _app(title: str, *routers: APIRouter) -> FastAPI:
    app = FastAPI(title=title)
    for router in routers:
        app.include_router(router)
    return app


async def _arrive(server: DrainingServer, parked: tuple[int, ...], channel: EngineEnd) -> None:
    await server.adopt(parked)
    channel.serving()


def _guarded(
    app: ASGIApp, settings: ServerSettings, pages: frozenset[str] = frozenset()
) -> ASGIApp:
    """`app` that requires the API key, and refuses browser pages of sites not in `pages`."""
    guarded = require_api_key(app, settings.api_key)
    return SameSiteOnly(guarded, pages, settings.own_hosts)


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
