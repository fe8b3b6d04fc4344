"""What the asynchronous client sends."""

from __future__ import annotations

import httpx
import pytest

from grpo_core.clients.aiohttp_transport import AiohttpTransport
from grpo_core.clients.service import AsyncServiceClient


@pytest.mark.parametrize(
    ("url", "authorization"),
    [
        ("http://run-api:8000", "Bearer secret"),
        ("http://me:p%40ss@run-api:8000", "Basic bWU6cEBzcw=="),  # me:p@ss
    ],
)
async def test_requests_have_the_url_the_credentials_and_the_cookies(
    url: str, authorization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[httpx.Request] = []

    async def answer(_: object, request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, headers={"set-cookie": "replica=2"}, request=request)

    monkeypatch.setattr(AiohttpTransport, "handle_async_request", answer)
    async with AsyncServiceClient("run-api", url + "/base/v1", 1.0, 1.0, token="secret") as client:
        await client.send("GET", "/status", json={"env_id": 3})
        await client.send("GET", "/status")

    assert {str(request.url) for request in seen} == {url + "/base/status"}
    assert {request.headers["authorization"] for request in seen} == {authorization}
    assert seen[0].content == b'{"env_id":3}'
    assert [request.headers.get("cookie") for request in seen] == [None, "replica=2"]
