"""Silent connections of clients end, and leave room for clients that send requests."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from prometheus_client.registry import Collector
from structlog.testing import capture_logs
from uvicorn.server import ServerState

from grpo_core import http_connections, metrics_port
from grpo_core.http_connections import LimitedProtocol
from grpo_core.metrics_port import serving_metrics
from grpo_runs.process.ports import free_port
from tests.support.virtual_time import VirtualTimeLoop
from tests.support.wait import DEADLINE_S, wait_for

KEEP_ALIVE_S = 75
HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"


async def ok(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


class Connection(asyncio.Transport):
    """A client's, in memory."""

    def __init__(self, app: Any = ok) -> None:
        super().__init__()
        self.closed_at: float | None = None
        config = uvicorn.Config(app, timeout_keep_alive=KEEP_ALIVE_S, log_config=None)
        self.protocol = LimitedProtocol(config, ServerState(), {})
        self.protocol.connection_made(self)

    def write(self, data: Any) -> None: ...

    def is_closing(self) -> bool:
        return self.closed_at is not None

    def close(self) -> None:
        if self.closed_at is None:
            loop = asyncio.get_running_loop()
            self.closed_at = loop.time()
            loop.call_soon(self.protocol.connection_lost, None)


@pytest.mark.parametrize("sent", [[], [HEAD], [HEAD + b"\r\n"], [HEAD + b"\r\n", HEAD]])
def test_a_connection_ends_without_a_whole_head(sent: list[bytes]) -> None:
    async def close_time() -> float | None:
        connection = Connection()
        for data in sent:
            connection.protocol.data_received(data)
            await asyncio.sleep(1)
        await asyncio.sleep(2 * KEEP_ALIVE_S)
        return connection.closed_at

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        assert runner.run(close_time()) == KEEP_ALIVE_S


async def test_at_the_limit_the_one_that_waits_longest_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_connections, "most_connections", lambda: 3)
    http_connections._warn.cache_clear()
    answer = asyncio.Event()

    async def slow(_scope: Any, _receive: Any, _send: Any) -> None:
        await answer.wait()

    busy = Connection(slow)
    busy.protocol.data_received(HEAD + b"\r\n")
    with capture_logs() as logs:
        others = [Connection() for _ in range(4)]
    assert [each.is_closing() for each in [busy, *others]] == [False, True, True, False, False]
    assert [entry["event"] for entry in logs] == ["connections.limit_reached"]
    for each in [busy, *others]:
        each.close()
    answer.set()
    await asyncio.gather(*busy.protocol.tasks)


class Nothing(Collector):
    def collect(self) -> Iterator[Any]:
        return iter(())


def test_silent_connections_leave_the_metrics_port_and_its_process_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_port._Handler, "timeout", 0.1)
    port = free_port()
    with serving_metrics("127.0.0.1", port, Nothing()), contextlib.ExitStack() as opened:
        address = ("127.0.0.1", port)
        connect = functools.partial(socket.create_connection, address, DEADLINE_S)
        silent = [opened.enter_context(connect()) for _ in range(40)]
        assert [each.recv(1) for each in silent] == [b""] * 40
        wait_for(lambda: status(f"http://127.0.0.1:{port}/metrics") == 200)


def status(url: str) -> int | None:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, trust_env=False).status_code
    return None
