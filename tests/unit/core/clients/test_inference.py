"""Clients of the inference server send the API key with every request."""

from __future__ import annotations

import httpx
import pytest

from grpo_core.clients.aiohttp_transport import AiohttpTransport
from grpo_core.clients.inference import BridgeClient, GenerationClient
from grpo_core.wire.policy_version import PolicyVersion
from tests.support.canned import PROMPT, generate_answer

INFO = {"policy_version": [0, 0], "paused": False, "weights_intact": True, "weights_socket": None}


async def test_every_request_carries_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str | None]] = []

    def answered(request: httpx.Request) -> httpx.Response:
        seen.append((request.url.path, request.headers.get("authorization")))
        body = generate_answer(["7"]) if request.url.path == "/generate" else INFO
        return httpx.Response(200, json=body, request=request)

    async def answered_later(_: object, request: httpx.Request) -> httpx.Response:
        return answered(request)

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", lambda _, r: answered(r))
    monkeypatch.setattr(AiohttpTransport, "handle_async_request", answered_later)
    with BridgeClient("http://server", control_url="http://control", api_key="a-key") as bridge:
        bridge.info()
        bridge.pause("session", 1.0, PolicyVersion(1, 1))
        bridge.resume("session", written=True)
        bridge.sample(PROMPT)
    async with GenerationClient("http://server", 1.0, 1, api_key="a-key") as client:
        await client.generate(PROMPT)
    paths = ["/bridge/info", "/bridge/pause", "/bridge/resume", "/generate", "/generate"]
    assert seen == [(path, "Bearer a-key") for path in paths]
