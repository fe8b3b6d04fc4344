"""A draining server waits for requests, and not for a client that never finishes one."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from grpo_vllm.http import server as http_server
from grpo_vllm.http.middleware import InFlight
from grpo_vllm.http.server import DrainingServer

AN_HOUR_S = 3600.0


async def ok(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.mark.parametrize(
    "begun",
    [
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Le",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nhalf",
    ],
)
async def test_half_a_request_does_not_hold_up_a_drain(
    begun: bytes, monkeypatch: pytest.MonkeyPatch
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
    writer.write(begun)
    await writer.drain()
    while not server.server_state.connections or not any(
        connection.in_request for connection in server.server_state.connections
    ):
        await asyncio.sleep(0.01)
    server.drain(AN_HOUR_S, lambda _: None, in_flight)
    await running
    assert b"200" not in await reader.read()
    writer.close()
