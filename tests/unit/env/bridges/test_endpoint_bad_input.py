"""Whatever a program of a rollout sends, the endpoint answers in words, and the rollout goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import aiohttp
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_env.bridges.chat import Chat
from grpo_env.bridges.endpoint import ChatEndpoint
from tests.support.damage import of_bytes, of_values
from tests.unit.env.bridges.scripted import ScriptedDialogue
from tests.unit.env.bridges.test_endpoint import CALL, OF_CHAT, OF_RESPONSES, QUESTION

KEY = {"Authorization": "Bearer key"}
SENT_BACK = {"id": "call_1", "function": {"name": "add", "arguments": '{"a": 2}'}}
CHAT = {
    "model": "policy",
    "messages": [
        QUESTION,
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "a"}],
            "tool_calls": [SENT_BACK],
        },
        {"role": "tool", "content": "5", "tool_call_id": "call_1"},
    ],
    "tools": OF_CHAT,
    "tool_choice": "auto",
    "max_tokens": 7,
    "stop": ["."],
    "n": 1,
    "stream": True,
    "stream_options": {"include_usage": True},
}
RESPONSES = {
    "model": "policy",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "2+3="}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "5"},
    ],
    "instructions": "Add.",
    "tools": OF_RESPONSES,
    "max_output_tokens": 7,
    "metadata": {"a": "b"},
    "stream": False,
}
MESSAGES = {
    "model": "policy",
    "system": [{"type": "text", "text": "Add."}],
    "messages": [
        QUESTION,
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 2}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "5"}],
        },
    ],
    "tools": [{"name": "add", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto"},
    "max_tokens": 7,
    "stop_sequences": ["."],
    "stream": True,
    "thread": {"type": "continue", "previous_message_id": None},
}
BODIES = {"chat/completions": CHAT, "responses": RESPONSES, "messages": MESSAGES}
HEADERS: list[Mapping[str, str]] = [
    {},
    {"Content-Type": "application/json; charset=none"},
    {"Content-Encoding": "gzip"},
]


@pytest.fixture(scope="module")
def opened() -> Iterator[tuple[asyncio.Runner, ChatEndpoint, aiohttp.ClientSession]]:
    async def session() -> aiohttp.ClientSession:
        return aiohttp.ClientSession()

    with asyncio.Runner() as runner:
        endpoint = ChatEndpoint("Authorization")
        runner.run(endpoint.__aenter__())
        http = runner.run(session())
        yield runner, endpoint, http
        runner.run(http.close())
        runner.run(endpoint.__aexit__())


@pytest.mark.parametrize("route", BODIES)
def test_no_request_is_a_fault_of_the_rollout(
    opened: tuple[asyncio.Runner, ChatEndpoint, aiohttp.ClientSession], route: str
) -> None:
    runner, endpoint, http = opened
    whole = json.dumps(BODIES[route]).encode()
    bodies = st.one_of(st.just(whole), of_values(whole, Path()), of_bytes(whole))

    async def answered(body: bytes, headers: Mapping[str, str]) -> tuple[int, str]:
        url = f"{endpoint.url}/{route}"
        async with http.post(url, data=body, headers={**KEY, **headers}) as answer:
            return answer.status, await answer.text()

    @settings(max_examples=settings.default.max_examples // 2)
    @given(bodies, st.sampled_from(HEADERS))
    @example(whole, {})
    def check(body: bytes, headers: Mapping[str, str]) -> None:
        chat = endpoint.sessions[KEY["Authorization"]] = Chat(ScriptedDialogue(CALL))
        status, text = runner.run(answered(body, headers))
        assert status in (200, 400, 413), text
        assert chat.failed is None, chat.failed
        if status != 200:
            assert json.loads(text)["error"]["message"]

    check()
