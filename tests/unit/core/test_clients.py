"""What clients send, and errors and answers through aiohttp, which are those of httpx."""

from __future__ import annotations

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from grpo_core.clients.aiohttp_transport import AiohttpTransport
from grpo_core.clients.inference import SERVICE, BridgeClient, GenerationClient
from grpo_core.clients.service import AsyncServiceClient, ServiceClient
from grpo_core.errors import OtherProtocol, ProtocolViolation
from grpo_core.protocol import VERSION
from grpo_core.wire.policy_version import PolicyVersion
from tests.support.canned import PROMPT, generate_answer, inference_routes
from tests.support.http_stub import stub_server


@asynccontextmanager
async def server(answer: bytes | None) -> AsyncIterator[str]:
    """Answers one connection with these bytes and closes it. None: never answers."""
    ended = asyncio.Event()

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answer is None:
            await reader.read()
        else:
            writer.write(answer)
            await writer.drain()
        writer.close()
        await writer.wait_closed()
        ended.set()

    listening = await asyncio.start_server(reply, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        await ended.wait()


def client(**options: float) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=AiohttpTransport("http://127.0.0.1", 1), timeout=httpx.Timeout(60.0, **options)
    )


async def test_a_compressed_answer_is_read() -> None:
    body = gzip.compress(b'{"text": "7"}')
    head = f"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: {len(body)}\r\n\r\n"
    async with server(head.encode() + body) as url, client() as http:
        answer = await http.get(url)
    assert (answer.status_code, answer.json()) == (200, {"text": "7"})


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf",
        b"this is not HTTP\r\n\r\n",
    ],
)
async def test_a_broken_answer_may_have_been_carried_out(answer: bytes) -> None:
    async with server(answer) as url, client() as http:
        with pytest.raises(httpx.ReadError):
            await http.post(url, json={})


@pytest.mark.parametrize("status", ["200 OK", "422 Unprocessable Content"])
async def test_a_server_of_another_protocol_is_named_with_both_releases(status: str) -> None:
    answer = f"HTTP/1.1 {status}\r\ncontent-length: 0\r\ngrpo-protocol: 999, grpo 7.8.9\r\n\r\n"
    async with server(answer.encode()) as url, AsyncServiceClient("run-api", url, 60, 60) as http:
        with pytest.raises(
            OtherProtocol, match=rf"run-api has protocol 999, grpo 7\.8\.9, .* grpo {VERSION}: "
        ):
            await http.send("GET", "/")


async def test_a_late_answer_is_a_read_timeout() -> None:
    async with server(None) as url, client(read=0.01) as http:
        with pytest.raises(httpx.ReadTimeout) as caught:
            await http.get(url)
    assert caught.value.request.extensions["timeout"]["read"] == 0.01


async def test_a_port_without_a_listener_is_a_connect_error() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # bound, but not listening
        async with client() as http:
            with pytest.raises(httpx.ConnectError):
                await http.get(f"http://127.0.0.1:{reserved.getsockname()[1]}")


async def test_a_server_that_does_not_read_is_a_read_timeout() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # the kernel accepts, and nobody reads
        async with client(connect=0.01, write=0.01, read=0.01) as http:
            with pytest.raises(httpx.ReadTimeout):
                await http.post(
                    f"http://127.0.0.1:{silent.getsockname()[1]}", content=bytes(64 * 2**20)
                )


def test_a_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "elsewhere")
    assert AiohttpTransport("http://run-api:8000", 1)._proxy == "http://proxy:3128"


INFO = {
    "lease_s": 1,
    "policy_version": [0, 0],
    "paused": False,
    "weights_intact": True,
    "weights_socket": None,
}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[httpx.Request]:
    """Requests of any client."""
    seen: list[httpx.Request] = []

    def answered(_: object, request: httpx.Request) -> httpx.Response:
        seen.append(request)
        body = generate_answer(["7"]) if request.url.path == "/generate" else INFO
        return httpx.Response(200, json=body, headers={"set-cookie": "replica=2"}, request=request)

    async def answered_later(transport: object, request: httpx.Request) -> httpx.Response:
        return answered(transport, request)

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", answered)
    monkeypatch.setattr(AiohttpTransport, "handle_async_request", answered_later)
    return seen


async def test_every_request_carries_the_key(seen: list[httpx.Request]) -> None:
    with BridgeClient("http://server", control_url="http://control", api_key="a-key") as bridge:
        bridge.info()
        assert bridge.pause("session", 1.0, PolicyVersion(1, 1)) == 1.0
        bridge.resume("session", written=True)
        bridge.sample(PROMPT)
    async with GenerationClient(SERVICE, "http://server", 1.0, 1.0, token="a-key") as client:
        await client.generate(PROMPT)
    paths = ["/bridge/info", "/bridge/pause", "/bridge/resume", "/generate", "/generate"]
    assert [request.url.path for request in seen] == paths
    assert {request.headers.get("authorization") for request in seen} == {"Bearer a-key"}


@pytest.mark.parametrize(
    ("url", "authorization"),
    [
        ("http://run-api:8000", "Bearer secret"),
        ("http://me:p%40ss@run-api:8000", "Basic bWU6cEBzcw=="),  # me:p@ss
    ],
)
async def test_requests_have_the_url_the_credentials_and_the_cookies(
    url: str, authorization: str, seen: list[httpx.Request]
) -> None:
    async with AsyncServiceClient("run-api", url + "/base/v1", 1.0, 1.0, token="secret") as client:
        await client.send("GET", "/status", json={"env_id": 3})
        await client.send("GET", "/status")

    assert {str(request.url) for request in seen} == {"http://run-api:8000/base/status"}
    with ServiceClient("run-api", url, 1.0, 1.0, token="secret") as blocking:
        assert blocking._http.headers["authorization"] == authorization
        assert blocking.base_url == "http://run-api:8000"
    assert {request.headers["authorization"] for request in seen} == {authorization}
    assert seen[0].content == b'{"env_id":3}'
    assert [request.headers.get("cookie") for request in seen] == [None, "replica=2"]


@pytest.mark.parametrize("entries", [None, [None, {"6": -1.0}], [None, {"6": -1.0}, {"8": -1.0}]])
def test_an_answer_without_the_logprobs_of_a_prompt_is_named(entries: list[object] | None) -> None:
    answer = generate_answer(["x"], prompt_logprobs=entries)
    routes = inference_routes(lambda _body: (200, answer))
    told = "prompt_logprobs in the response from /generate does not hold the logprobs of the 3"
    with (
        stub_server(routes) as server,
        BridgeClient(server.url) as bridge,
        pytest.raises(ProtocolViolation, match=told),
    ):
        bridge.prompt_logprobs(PROMPT)
