from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from grpo_core.errors import ServiceUnavailable
from grpo_env.bridges.chat import Chat, ChatEndpoint
from tests.unit.env.bridges.scripted import ScriptedDialogue

TOOLS = [{"type": "function", "function": {"name": "add"}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'


@pytest.fixture
async def endpoint() -> AsyncIterator[ChatEndpoint]:
    async with ChatEndpoint("X-Rollout") as endpoint:
        yield endpoint


async def post(endpoint: ChatEndpoint, rollout: str, **body: Any) -> httpx.Response:
    request = {"model": "policy", "messages": [{"role": "user", "content": "2+3="}], **body}
    async with httpx.AsyncClient(headers={"X-Rollout": rollout}) as client:
        return await client.post(f"{endpoint.url}/chat/completions", json=request)


async def test_each_rollout_is_answered_by_its_own_dialogue(endpoint: ChatEndpoint) -> None:
    for name in ("a", "b"):
        endpoint.sessions[name] = Chat(ScriptedDialogue(f"{name} says"))
    for name in ("b", "a"):
        answer = (await post(endpoint, name)).json()
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": f"{name} says"}
        assert choice["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == len(f"{name} says")
    unknown = await post(endpoint, "c")
    assert (unknown.status_code, "X-Rollout" in unknown.text) == (404, True)


async def test_a_stream_holds_the_same_answer(endpoint: ChatEndpoint) -> None:
    for name in ("whole", "stream"):
        endpoint.sessions[name] = Chat(ScriptedDialogue(CALL))
    whole = (await post(endpoint, "whole", tools=TOOLS)).json()["choices"][0]
    stream = await post(endpoint, "stream", tools=TOOLS, stream=True)

    assert stream.headers["Content-Type"] == "text/event-stream"
    events = [line.removeprefix("data: ") for line in stream.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    chunk = json.loads(events[0])["choices"][0]
    (call,) = chunk["delta"].pop("tool_calls")
    assert {"index": 0, **whole["message"].pop("tool_calls")[0]} == call
    assert chunk["delta"] == whole["message"]
    assert chunk["finish_reason"] == whole["finish_reason"] == "tool_calls"
    assert json.loads(events[1])["usage"]["completion_tokens"] == len(CALL)


async def test_errors_are_refusals_and_the_first_one_is_kept(endpoint: ChatEndpoint) -> None:
    class Broken(ScriptedDialogue):
        async def say(self, *_: Any, **__: Any) -> Any:
            raise ServiceUnavailable(f"request {len(self.requests)}")

    session = endpoint.sessions["broken"] = Chat(Broken())
    assert (await post(endpoint, "broken")).status_code == 400  # clients repeat after a 5xx
    first = session.failed
    assert isinstance(first, ServiceUnavailable)
    await post(endpoint, "broken")
    assert session.failed is first

    full = endpoint.sessions["full"] = Chat(ScriptedDialogue())
    response = await post(endpoint, "full")
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert full.failed is None


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/completions"])
async def test_other_interfaces_are_refused_by_name(endpoint: ChatEndpoint, path: str) -> None:
    async with httpx.AsyncClient() as client:
        response = await client.post(endpoint.url.removesuffix("/v1") + path, json={})
    assert response.status_code == 404
    assert f"no route {path}; only the chat completions API" in response.json()["error"]["message"]


async def test_several_answers_to_one_request_are_refused(endpoint: ChatEndpoint) -> None:
    endpoint.sessions["a"] = Chat(ScriptedDialogue("1"))
    refused = await post(endpoint, "a", n=2)
    assert (refused.status_code, "expected n=1" in refused.text) == (400, True)
