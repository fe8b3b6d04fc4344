"""Every client's connection is probed by the kernel, so that a silent network is noticed."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from grpo_core.clients.inference import SERVICE, GenerationClient
from grpo_core.clients.run_api import TrainerClient
from grpo_core.errors import ServiceUnavailable
from grpo_core.redis.connection import FAILURES, AsyncRedisConnection, RedisConnection
from grpo_core.sockets import no_proxy, proxy_for

KEEPALIVE = "02"
"""The timer in /proc/net/tcp of a connection that the kernel probes."""


LOOPBACK = ("127.0.0.1", "[::1]", "localhost")


def with_http(port: int) -> None:
    with TrainerClient(f"http://127.0.0.1:{port}", 0.0) as client, suppress(ServiceUnavailable):
        client.status()


def with_aiohttp(port: int) -> None:
    async def ask() -> None:
        async with GenerationClient(SERVICE, f"http://127.0.0.1:{port}", 60.0, 60.0) as client:
            with suppress(httpx.TransportError):
                await client.generate([1])

    asyncio.run(ask())


def with_redis(port: int) -> None:
    call_redis(f"redis://127.0.0.1:{port}")


def call_redis(url: str) -> None:
    with RedisConnection(url, 60.0, 0.0) as client, suppress(ServiceUnavailable):
        client.call("PING")


def with_async_redis(port: int) -> None:
    call_redis_async(f"redis://127.0.0.1:{port}")


def call_redis_async(url: str) -> None:
    async def ask() -> None:
        async with AsyncRedisConnection(url, 60.0) as client:
            with suppress(*FAILURES):
                await client.attempt("PING")

    asyncio.run(ask())


@pytest.fixture
def seen() -> Iterator[tuple[int, list[str]]]:
    """The port of a server that closes every connection, and the timers that it saw."""
    timers: list[str] = []

    def serve(listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, (_, port) = listening.accept()
                with connection:
                    connection.recv(1)
                    timers.append(timer_of(port, listening.getsockname()[1]))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, args=(listening,), daemon=True).start()
        yield listening.getsockname()[1], timers


def timer_of(port: int, server: int) -> str:
    """Of the connection whose local end has this port. Another one, to another server, may have the
    same."""
    ends = [f"0100007F:{number:04X}" for number in (port, server)]
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return next(row[5][:2] for row in rows if row[1:3] == ends)


@pytest.mark.parametrize("connect", [with_http, with_aiohttp, with_redis, with_async_redis])
def test_the_kernel_probes_the_connection(
    connect: Callable[[int], None], seen: tuple[int, list[str]]
) -> None:
    port, timers = seen
    connect(port)
    assert timers[0] == KEEPALIVE


@pytest.mark.parametrize("call", [call_redis, call_redis_async])
def test_a_unix_socket_of_redis_is_not_probed(call: Callable[[str], None], tmp_path: Path) -> None:
    asked: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "redis"))
        listening.listen()
        server = threading.Thread(target=lambda: asked.append(first_bytes(listening)), daemon=True)
        server.start()
        call(f"unix://{tmp_path}/redis")
        server.join()
    assert asked[0].startswith(b"*")


def first_bytes(listening: socket.socket) -> bytes:
    """Of the next connection, which is then closed."""
    with listening.accept()[0] as connection:
        return connection.recv(1)


PROXY = "http://proxy:3128"


@pytest.mark.parametrize(
    ("variables", "host", "expected"),
    [
        ({"http_proxy": PROXY}, "run-api", PROXY),
        ({"all_proxy": PROXY}, "run-api", PROXY),
        ({"http_proxy": "proxy:3128"}, "run-api", PROXY),
        ({"http_proxy": PROXY, "no_proxy": "run-api"}, "run-api", None),
        *(({"http_proxy": PROXY, "no_proxy": "x"}, host, None) for host in LOOPBACK),
        ({}, "run-api", None),
    ],
)
def test_the_proxy_of_the_environment_leads_to_every_host_but_loopback(
    variables: dict[str, str], host: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert proxy_for(f"http://{host}:8000") == expected


def test_hosts_that_need_no_proxy_stay_so_beside_loopback() -> None:
    for name in ("NO_PROXY", "no_proxy"):
        found = no_proxy({name: "run-api"})
        assert {*found.values()} == {"run-api,127.0.0.1,localhost"}
        assert {*found} == {"NO_PROXY", "no_proxy"}
        assert {*no_proxy({name: "*"}).values()} == {"*"}  # libraries know no list with it
