"""Sockets and HTTP servers that leave signals to this process and end together."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Generator
from dataclasses import dataclass

import structlog
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from grpo_vllm.engine_internals import let_handlers_stop
from grpo_vllm.readiness_gate import Barrier, ReadinessGate

log = structlog.get_logger()

WATCH_S = 1.0
GRACEFUL_SHUTDOWN_S = 5


class HttpServer(uvicorn.Server):
    """Leaves signals alone: uvicorn would raise them again at its end, and the process would be
    gone before the engine's processes are."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                access_log=False,
                log_level="warning",
                timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S,
            )
        )

    @classmethod
    def gated(cls, app: FastAPI, barrier: Barrier, hold_s: float) -> HttpServer:
        """A server of vLLM's application, behind the gate."""
        server = cls(ReadinessGate(app, barrier, hold_s))
        let_handlers_stop(app, server)
        return server

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@dataclass(frozen=True)
class Endpoint:
    """A server and the socket it answers on."""

    server: HttpServer
    socket: socket.socket


def bound_socket(host: str, port: int) -> socket.socket:
    """Raises `OSError` where the address is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((host, port))
    return bound


async def serve_until(ended: Callable[[], bool], endpoints: list[Endpoint]) -> None:
    """Serve until SIGTERM, SIGINT, the end of one server, or until `ended`."""
    stop = _stop_event()
    watch = asyncio.create_task(_stop_when(ended, stop))
    running = [asyncio.create_task(e.server.serve(sockets=[e.socket])) for e in endpoints]
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([stopped, *running], return_when=asyncio.FIRST_COMPLETED)
        log.info("stopping")
        for endpoint in endpoints:
            endpoint.server.should_exit = True
        await asyncio.gather(*running)
    finally:
        watch.cancel()
        stopped.cancel()


def _stop_event() -> asyncio.Event:
    """Set by SIGTERM and SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def _stop_when(ended: Callable[[], bool], stop: asyncio.Event) -> None:
    while not ended():
        await asyncio.sleep(WATCH_S)
    stop.set()
