"""A draining server waits for requests, not for a client that never finishes one; the API key."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import httpx
import pytest
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from grpo_core.weights.supervisor import SupervisorPhase, SupervisorStatus
from grpo_vllm.http import server as http_server
from grpo_vllm.http.middleware import InFlight
from grpo_vllm.http.server import DrainingServer, require_api_key
from grpo_vllm.supervisor.main import health_app

AN_HOUR_S = 3600.0
KEY = SecretStr("one-key")
GUARDED = ("/generate", "/bridge/info", "/bridge/pause", "/lora/load", "/v1/models", "/docs")


async def ok(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.mark.parametrize("rest", [b"Content-Le", b"Content-Length: 9\r\n\r\nhalf"])
async def test_half_a_request_does_not_hold_up_a_drain(
    rest: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "UNFINISHED_S", 0.0)
    listening = socket.create_server(("127.0.0.1", 0))
    in_flight = InFlight()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await in_flight.pass_on(ok, scope, receive, send)

    server = DrainingServer(app)
    running = asyncio.create_task(server.serve(sockets=[listening]))
    await server.adopt([])  # waits for the start
    reader, writer = await asyncio.open_connection(*listening.getsockname())
    writer.write(b"POST /generate HTTP/1.1\r\nHost: localhost\r\n" + rest)
    await writer.drain()
    while not any(connection.in_request for connection in server.server_state.connections):
        await asyncio.sleep(0.01)
    server.drain(AN_HOUR_S, lambda _: None, in_flight)
    await running
    assert b"200" not in await reader.read()
    writer.close()


async def status(app: object, path: str, *words: str) -> int:
    transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        headers = {"authorization": " ".join(words)} if words else {}
        return (await client.get(path, headers=headers)).status_code


async def test_every_route_asks_for_the_key_but_those_of_probes() -> None:
    routes = [Route("/{rest:path}", lambda _: Response())]
    app = require_api_key(Starlette(routes=routes), KEY)
    for path in GUARDED:
        assert await status(app, path, "Bearer", "one-key") == 200
        for wrong in ((), ("Bearer", "one"), ("Basic", "one-key")):
            assert await status(app, path, *wrong) == 401
    assert [await status(app, path) for path in ("/health", "/metrics")] == [200, 200]
    assert await status(require_api_key(Starlette(routes=routes), None), "/generate") == 200
    serving = SupervisorStatus(state=SupervisorPhase.SERVING, epoch=0, step=0)
    supervisor = health_app(lambda: serving, lambda: True, KEY)
    assert [await status(supervisor, path) for path in ("/healthz", "/readyz")] == [200, 200]
    assert await status(supervisor, "/status") == 401
    assert await status(supervisor, "/status", "Bearer", "one-key") == 200
