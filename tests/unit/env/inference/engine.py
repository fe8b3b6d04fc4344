"""An inference server on a real socket in the test's event loop, which can restart or be gone.

As with vllm-api-server, the listening socket outlives an engine that ends: the kernel accepts
connections, and the next engine answers them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from tests.support.canned import generate_answer


class Engine:
    """`received`: the bodies of requests to /generate; `probes`: who sent those to /health.

    `open`: requests wait for it before they are answered; `status`, `health`: of the answers;
    `is_silent`: no probe is answered; `name`, `version`: as it tells them.
    """

    def __init__(self, address: str = "127.0.0.1", port: int = 0) -> None:
        self.address = address
        self._reserved = _bound(address, port)  # nobody else gets it while nothing listens
        self.port = self._reserved.getsockname()[1]
        self._listening: socket.socket | None = None
        self._runner: web.AppRunner | None = None
        self.url = f"http://{address}:{self.port}"
        self.name, self.version = "", (1, 0)
        self.received: list[dict[str, Any]] = []
        self.probes: list[Any] = []
        self.open = asyncio.Event()
        self.open.set()
        self.status = self.health = 200
        self.is_silent = self.shares_weights = False

    async def start(self) -> None:
        if self._listening is None:
            self._listening = _bound(self.address, self.port)
            self._listening.listen(1000)
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/health", self._health)
        app.router.add_get("/bridge/info", self._info)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.001)
        await self._runner.setup()
        self._accepting = self._listening.dup()
        await web.SockSite(self._runner, self._accepting).start()

    async def crash(self) -> None:
        """End the engine: requests in flight lose their connections, new ones wait for `start`."""
        if self._runner is not None:
            # asyncio never closes a connection that it has just accepted when its server closes.
            asyncio.get_running_loop().remove_reader(self._accepting)
            await asyncio.sleep(0)
            await self._runner.cleanup()
            self._runner = None

    async def vanish(self) -> None:
        """End the whole server: connections are refused."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        await self.crash()

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.received.append(body)
        await self.open.wait()
        if self.status != 200:
            return web.json_response({"detail": "not now"}, status=self.status)
        texts = [self.url] * body.get("n", 1)
        versions = [[self.version, self.version]] * len(texts)
        return web.json_response(generate_answer(texts, policy_version=versions))

    async def _health(self, request: web.Request) -> web.Response:
        self.probes.append(request.transport and request.transport.get_extra_info("peername"))
        if self.is_silent:
            await asyncio.Event().wait()
        return web.Response(status=self.health)

    async def _info(self, _request: web.Request) -> web.Response:
        told = {"name": self.name, "policy_version": self.version}
        return web.json_response({"shared_weights": self.shares_weights, **told})


@contextlib.asynccontextmanager
async def engines(count: int, *more: Engine) -> AsyncIterator[list[Engine]]:
    """Started servers. `text` of their answers is their URL."""
    started = [*(Engine() for _ in range(count)), *more]
    try:
        for engine in started:
            await engine.start()
        yield started
    finally:
        for engine in started:
            engine.open.set()
            await engine.vanish()
            engine._reserved.close()


def _bound(address: str, port: int) -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind((address, port))
    bound.setblocking(False)
    return bound
