"""Puts engine, routes and sockets together and serves until told to stop."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator
from typing import Any

import structlog

from grpo_core.bridge_config import BridgeConfig
from grpo_core.errors import GrpoError
from grpo_vllm.admission import PROCESSOR
from grpo_vllm.applications import control_app, include_control, public_app
from grpo_vllm.arena import dtype_name
from grpo_vllm.beginning import Beginning, begin_after
from grpo_vllm.bridge import WeightBridge
from grpo_vllm.bridge_file import announced
from grpo_vllm.engine_internals import (
    EngineControl,
    check_requests_with,
    current_platform,
    device_type,
    open_engine,
    parse_engine_arguments,
    refuse_parallel_engines,
)
from grpo_vllm.http_servers import Endpoint, HttpServer, bound_socket, serve_until
from grpo_vllm.plugin_names import LOAD_FORMAT, WORKER_EXTENSION
from grpo_vllm.served_record import NoRecord, ServedRecord, ServedWeights, WeightsRecord
from grpo_vllm.settings import ServerSettings
from grpo_vllm.weight_server import import_from_worker, serve_weights

log = structlog.get_logger()

LOGPROBS_MODE = "processed_logprobs"
"""Log-probabilities of the distribution sampled from: the ratio's denominator needs those."""


class EngineDied(GrpoError):
    """The engine ended, or does not answer any more, while the server was up."""


def run(settings: ServerSettings) -> None:
    """Serve until SIGTERM or SIGINT. Raises `EngineDied` when the engine goes first."""
    # The engine starts inside a blocking call; until the loop's own handlers stand, SIGTERM must
    # unwind the stack, or the engine's processes would outlive this one.
    signal.signal(signal.SIGTERM, _unwind)
    asyncio.run(_serve(settings))


def _unwind(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def engine_arguments(settings: ServerSettings) -> list[str]:
    """Our options as vLLM's, then the user's own, which win where both name one."""
    ours = [
        *("--model", settings.model),
        *("--host", settings.host),
        *("--port", str(settings.port)),
        *("--logprobs-mode", LOGPROBS_MODE),
        # Else the model's own defaults for top_p and the like would apply to /v1 requests unseen.
        *("--generation-config", "vllm"),
    ]
    if settings.share_weights:
        ours += ["--load-format", LOAD_FORMAT, "--worker-extension-cls", WORKER_EXTENSION]
    return [*ours, *settings.engine_arguments]


async def _serve(settings: ServerSettings) -> None:
    arguments = _parsed_engine_arguments(settings)
    async with contextlib.AsyncExitStack() as stack:
        public = stack.enter_context(bound_socket(settings.host, settings.port))
        control = _control_socket(settings, stack)
        record = await _open_record(settings, stack)
        served = await record.read(settings.redis_deadline_s)
        engine = await stack.enter_async_context(open_engine(arguments))
        beginning = begin_after(served, settings.await_weights)
        bridge = await _begin(settings, engine, beginning, record)
        shared = await stack.enter_async_context(_sharing(settings, engine, bridge))
        app = await public_app(engine, arguments, bridge, shared)
        if control is None and settings.public_is_loopback:
            include_control(app, settings, engine, bridge)
        endpoints = [Endpoint(HttpServer.gated(app, bridge, settings.write_back_hold_s), public)]
        if control is not None:
            endpoints.append(Endpoint(HttpServer(control_app(settings, engine, bridge)), control))
        log.info("serving", host=settings.host, port=settings.port, model=settings.model)
        await serve_until(lambda: engine.errored or bridge.engine.broken, endpoints)
        if engine.errored:
            raise EngineDied("the engine process ended; its last lines in this log say why")
        if bridge.engine.broken:
            raise EngineDied("the engine did not resume after a pause")


def _parsed_engine_arguments(settings: ServerSettings) -> argparse.Namespace:
    arguments = parse_engine_arguments(engine_arguments(settings))
    if settings.share_weights:
        refuse_parallel_engines(arguments)
    if current_platform.is_cpu():
        check_requests_with(PROCESSOR, arguments)
    return arguments


def _control_socket(
    settings: ServerSettings, stack: contextlib.AsyncExitStack
) -> socket.socket | None:
    if settings.control_port is None:
        return None
    return stack.enter_context(bound_socket(settings.control_host, settings.control_port))


async def _open_record(settings: ServerSettings, stack: contextlib.AsyncExitStack) -> WeightsRecord:
    """Weights that nobody can write are always the checkpoint's: there is nothing to remember."""
    if settings.redis_url is None or not settings.share_weights:
        return NoRecord()
    return await stack.enter_async_context(ServedRecord(settings.redis_url, settings.run_id))


async def _begin(
    settings: ServerSettings, engine: Any, beginning: Beginning, record: WeightsRecord
) -> WeightBridge:
    bridge = WeightBridge(EngineControl(engine), beginning.version, record)
    await bridge.engine.name_weights(bridge.version)
    if beginning.new_name:
        await record.note(ServedWeights(bridge.version, intact=True, trained=False))
    if beginning.missing:
        bridge.write_back.begin(bridge.version, settings.write_back_deadline_s)
    return bridge


@contextlib.asynccontextmanager
async def _sharing(
    settings: ServerSettings, engine: Any, bridge: WeightBridge
) -> AsyncIterator[BridgeConfig | None]:
    """Weights and their description are there for trainers inside the context."""
    if not settings.share_weights:
        yield None
        return
    weights = await import_from_worker(engine)
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
        with announced(
            config, settings.bridge_config_file, required=settings.bridge_config_required
        ):
            log.info(
                "sharing weights",
                socket=str(settings.socket_path),
                generation=config.generation,
                megabytes=round(config.total_bytes / 1e6, 1),
                parameters=len(config.param_mappings),
            )
            yield config
