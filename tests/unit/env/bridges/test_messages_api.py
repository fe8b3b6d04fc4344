"""The official client of Anthropic reads every answer of the endpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic import AsyncAnthropic, beta_async_tool
from structlog.testing import capture_logs

from grpo_env.bridges.agent_program import Client
from grpo_env.bridges.chat import MODEL, Chat
from grpo_env.bridges.endpoint import ChatEndpoint
from tests.unit.env.bridges.scripted import ScriptedDialogue
from tests.unit.env.bridges.test_endpoint import (
    ADD,
    CALL,
    OF_CHAT,
    QUESTION,
    TEXT,
)
from tests.unit.env.bridges.test_endpoint import (
    endpoint as endpoint,
)

TOOL: dict[str, Any] = {"name": "add", "input_schema": ADD["parameters"]}
NO_OBJECT = '<tool_call>{"name": "add", "arguments": [2, 3]}</tool_call>'
HOW: Any = {"model": MODEL, "max_tokens": 7}
CACHED = {"cache_control": {"type": "ephemeral"}}


@pytest.fixture
async def client(endpoint: ChatEndpoint) -> AsyncIterator[AsyncAnthropic]:
    http = httpx2.AsyncClient(verify=False)  # loading certificates takes longer than these tests
    given = Client(endpoint.url, "key", Path()).variables(endpoint.url)
    url, key = given["ANTHROPIC_BASE_URL"], given["ANTHROPIC_API_KEY"]
    async with AsyncAnthropic(base_url=url, api_key=key, http_client=http) as client:
        yield client


def opened(endpoint: ChatEndpoint, *texts: str, **how: Any) -> tuple[ScriptedDialogue, Chat]:
    """The client's rollout, whose policy says these texts."""
    dialogue = ScriptedDialogue(*texts, **how)
    chat = endpoint.sessions["Bearer key"] = Chat(dialogue)
    return dialogue, chat


def result(call: Any, content: str) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call.id, "content": content}


async def test_a_conversation_continues_with_the_exact_text_of_calls(
    endpoint: ChatEndpoint, client: AsyncAnthropic
) -> None:
    dialogue, _ = opened(endpoint, CALL + CALL.removeprefix(TEXT), NO_OBJECT, "5")
    system = [{"type": "text", "text": "Add.", **CACHED}]
    how: Any = {**HOW, "system": system, "tools": [TOOL], "stop_sequences": ["."]}
    first = await client.messages.create(messages=[QUESTION], **how)  # type: ignore[list-item]
    text, one, two = first.content
    assert (text.text, one.input, two.input) == (TEXT, {"a": 2, "b": 3}, {"a": 2, "b": 3})  # type: ignore[union-attr]
    assert first.stop_reason == "tool_use"
    assert first.usage.output_tokens == len(CALL + CALL) - len(TEXT)

    said = [{"type": "thinking", "thinking": "hm", "signature": ""}, text, one, two]
    back = [result(one, "5"), result(two, "5"), {"type": "text", "text": "Sure?", **CACHED}]
    messages: list[Any] = [QUESTION, {"role": "assistant", "content": said}]
    messages.append({"role": "user", "content": back})
    second = await client.messages.create(messages=messages, **how)
    assert second.content[0].input == {"INVALID_JSON": [2, 3]}  # type: ignore[union-attr]

    messages.append({"role": "assistant", "content": second.content})
    messages.append({"role": "user", "content": [result(second.content[0], "no object")]})
    last = await client.messages.create(messages=messages, **how)
    assert (last.content[0].text, last.stop_reason) == ("5", "end_turn")  # type: ignore[union-attr]
    assert dialogue.requests[2] == [
        {"role": "system", "content": "Add."},
        QUESTION,
        {"role": "assistant", "content": CALL + CALL.removeprefix(TEXT)},
        {"role": "tool", "content": "5"},
        {"role": "tool", "content": "5"},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": NO_OBJECT},
        {"role": "tool", "content": "no object"},
    ]
    assert dialogue.options[0] == {"tools": OF_CHAT, "max_tokens": 7, "stop": (".",)}


async def test_a_stream_holds_the_same_answer(
    endpoint: ChatEndpoint, client: AsyncAnthropic
) -> None:
    opened(endpoint, CALL)
    how: Any = {**HOW, "messages": [QUESTION], "tools": [TOOL]}
    async with client.messages.stream(**how) as stream:
        kinds = [event.type async for event in stream]
        message = await stream.get_final_message()
    text, call = message.content
    assert (text.text, call.input) == (TEXT, {"a": 2, "b": 3})  # type: ignore[union-attr]
    assert (message.stop_reason, message.usage.output_tokens) == ("tool_use", len(CALL))
    block = ["content_block_start", "content_block_delta"]
    assert kinds[:3] == ["message_start", *block]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert "input_json" in kinds


async def test_a_thread_continues_with_its_messages_and_tools(
    endpoint: ChatEndpoint, client: AsyncAnthropic
) -> None:
    @beta_async_tool
    async def add(a: int, b: int) -> str:
        """Add."""
        return str(a + b)

    dialogue, _ = opened(endpoint, CALL, "5")
    how: Any = {**HOW, "system": "Be brief.", "messages": [QUESTION], "tools": [add]}
    message = await client.beta.messages.tool_runner(**how).until_done()
    assert message.content[0].text == "5"  # type: ignore[union-attr]
    assert dialogue.requests[1] == [
        {"role": "system", "content": "Be brief."},
        QUESTION,
        {"role": "assistant", "content": CALL},
        {"role": "tool", "content": "5"},
    ]
    assert dialogue.options[0]["tools"] == dialogue.options[1]["tools"] != []
    lost = {"thread": {"type": "continue", "previous_message_id": "msg_1"}}
    with pytest.raises(anthropic.BadRequestError, match="'msg_1': no message of this rollout"):
        await client.messages.create(messages=[QUESTION], **HOW, extra_body=lost)  # type: ignore[list-item]


async def test_an_answer_without_tools_may_be_cut_off_or_empty(
    endpoint: ChatEndpoint, client: AsyncAnthropic
) -> None:
    dialogue, _ = opened(endpoint, CALL, "", cut_off=True)
    how: Any = {**HOW, "messages": [QUESTION], "tools": [TOOL], "tool_choice": {"type": "none"}}
    message = await client.messages.create(**how)
    assert (message.content[0].text, message.stop_reason) == (CALL, "max_tokens")  # type: ignore[union-attr]
    assert dialogue.options[0]["tools"] == []
    async with client.messages.stream(**how) as stream:
        assert await stream.get_final_text() == ""


async def test_the_tokens_of_a_request_are_counted_without_an_answer(
    endpoint: ChatEndpoint, client: AsyncAnthropic
) -> None:
    dialogue, _ = opened(endpoint)
    asked: Any = {"model": MODEL, "system": "Add.", "messages": [QUESTION], "tools": [TOOL]}
    assert (await client.messages.count_tokens(**asked)).input_tokens == 3
    with pytest.raises(anthropic.BadRequestError, match="expected at least one message"):
        await client.messages.count_tokens(model=MODEL, messages=[])
    assert dialogue.requests == []


async def test_the_key_may_be_in_the_header_of_older_clients(
    endpoint: ChatEndpoint, client: AsyncAnthropic
) -> None:
    opened(endpoint, "5")
    key: Any = {"Authorization": anthropic.omit, "x-api-key": "key"}
    message = await client.messages.create(messages=[QUESTION], **HOW, extra_headers=key)  # type: ignore[list-item]
    assert message.content[0].text == "5"  # type: ignore[union-attr]


async def test_refusals_have_the_form_that_the_client_reads(
    endpoint: ChatEndpoint, client: AsyncAnthropic
) -> None:
    with pytest.raises(anthropic.AuthenticationError, match="no rollout is open"):
        await client.messages.create(messages=[QUESTION], **HOW)  # type: ignore[list-item]
    opened(endpoint)
    with pytest.raises(anthropic.BadRequestError) as full:
        await client.messages.create(messages=[QUESTION], **HOW)  # type: ignore[list-item]
    assert full.value.type == "invalid_request_error"


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": [IMAGE]}


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "user message has a part of the type 'image'",
        ),
        (
            {"messages": [{"role": "user", "content": [RESULT]}]},
            "tool message has a part of the type 'image'",
        ),
        ({"messages": []}, "expected at least one message"),
        ({"messages": [{"role": "user"}]}, "form of the API: KeyError: 'content'"),
        ({"tools": [{"type": "web_search_20250305", "name": "s"}]}, "tools of .* web_search"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers: not supported"),
    ],
)
async def test_what_cannot_be_trained_on_is_refused_by_name(
    endpoint: ChatEndpoint, client: AsyncAnthropic, wrong: Any, problem: str
) -> None:
    _, chat = opened(endpoint, "1")
    body = {**HOW, "messages": [QUESTION], **wrong}
    with pytest.raises(anthropic.BadRequestError, match=problem):
        await client.post("/v1/messages", body=body, cast_to=object)
    assert (chat.failed, chat.last) == (None, None)


async def test_options_that_have_no_effect_are_logged(
    endpoint: ChatEndpoint, client: AsyncAnthropic
) -> None:
    opened(endpoint, "1", "2")
    asked: Any = {**HOW, "messages": [QUESTION], "tools": [TOOL]}
    choices: list[Any] = [{"type": "auto"}, {"type": "any"}]
    others = [{"thinking": {"type": "disabled"}}, {"temperature": 0.1}]
    with capture_logs() as logs:
        for choice, other in zip(choices, others, strict=True):
            await client.messages.create(**asked, tool_choice=choice, extra_body=other)
    assert [line["options"] for line in logs] == [["thinking"], ["temperature", "tool_choice"]]
