"""Puts engine, routes and sockets together and serves until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Generator
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI

from grpo_core.errors import GrpoError
from grpo_vllm import routes
from grpo_vllm.bridge import WeightBridge
from grpo_vllm.engine_internals import (
    EngineControl,
    build_openai_app,
    open_engine,
    parse_engine_arguments,
    refuse_parallel_engines,
)
from grpo_vllm.plugin_names import LOAD_FORMAT, WORKER_EXTENSION
from grpo_vllm.settings import ServerSettings
from grpo_vllm.weight_server import import_from_worker, serve_weights

log = structlog.get_logger()

ENGINE_WATCH_S = 1.0
GRACEFUL_SHUTDOWN_S = 5
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
    arguments = parse_engine_arguments(engine_arguments(settings))
    if settings.share_weights:
        refuse_parallel_engines(arguments)
    public = _listen(settings.host, settings.port)
    control = (
        _listen(settings.control_host, settings.control_port) if settings.control_port else None
    )
    async with open_engine(arguments) as engine:
        control_of_engine = EngineControl(engine)
        bridge = WeightBridge(control_of_engine)
        await control_of_engine.name_weights(bridge.version)
        async with _shared_weights(settings, engine, bridge) as shared:
            app = await build_openai_app(engine, arguments)
            app.include_router(routes.public_router(engine, bridge, shared))
            control_app = app if control is None else FastAPI(title="vllm-server control")
            if control is not None or settings.public_is_loopback:
                router = routes.control_router(bridge, settings.max_pause_lease_s)
                control_app.include_router(router)
            log.info("serving", host=settings.host, port=settings.port, model=settings.model)
            await _run_servers(engine, bridge, app, public, control_app, control)


@contextlib.asynccontextmanager
async def _shared_weights(
    settings: ServerSettings, engine: Any, bridge: WeightBridge
) -> AsyncIterator[routes.SharedWeights | None]:
    if not settings.share_weights:
        yield None
        return
    weights = await import_from_worker(engine)
    async with serve_weights(settings.socket_path, weights, bridge):
        log.info(
            "sharing weights",
            socket=str(settings.socket_path),
            generation=weights.manifest.generation,
            megabytes=round(weights.manifest.total_bytes / 1e6, 1),
            parameters=len(weights.manifest.parameters),
        )
        yield routes.SharedWeights(weights.manifest, settings.socket_path)


async def _run_servers(
    engine: Any,
    bridge: WeightBridge,
    app: FastAPI,
    public: socket.socket,
    control_app: FastAPI,
    control: socket.socket | None,
) -> None:
    servers = [(_Server(_config(app)), public)]
    if control is not None:
        servers.append((_Server(_config(control_app)), control))
    stop = _stop_event()
    watch = asyncio.create_task(_stop_with_engine(engine, bridge, stop))
    running = [asyncio.create_task(server.serve(sockets=[sock])) for server, sock in servers]
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([stopped, *running], return_when=asyncio.FIRST_COMPLETED)
        log.info("stopping")
        for server, _ in servers:
            server.should_exit = True
        await asyncio.gather(*running)
    finally:
        watch.cancel()
        stopped.cancel()
    if engine.errored:
        raise EngineDied("the engine process ended; its last lines in this log say why")
    if bridge.broken.is_set():
        raise EngineDied("the engine did not resume after a pause")


def _stop_event() -> asyncio.Event:
    """Set by SIGTERM and SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def _stop_with_engine(engine: Any, bridge: WeightBridge, stop: asyncio.Event) -> None:
    while not (engine.errored or bridge.broken.is_set()):
        await asyncio.sleep(ENGINE_WATCH_S)
    stop.set()


def _config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S,
    )


class _Server(uvicorn.Server):
    """Leaves signals alone: uvicorn would raise them again at its end, and the process would be
    gone before the engine's processes are."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener
