from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from grpo_core.errors import ServiceUnavailable
from grpo_env.bridges.chat import Chat, ChatEndpoint, ImagesUnsupported, plain_message
from grpo_env.tasks import ContextFull
from tests.unit.env.bridges.scripted import ScriptedDialogue

QUESTION = {"role": "user", "content": "What is 2+3?"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = 'I add. <tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


async def test_answers_that_come_back_parsed_continue_with_their_exact_text() -> None:
    dialogue = ScriptedDialogue(CALL, "5")
    chat = Chat(dialogue)

    first = await chat.complete([QUESTION], [ADD])
    (call,) = first.tool_calls
    assert (first.content, first.finish_reason) == ("I add.", "tool_calls")
    assert call["function"] == {"name": "add", "arguments": '{"a": 2, "b": 3}'}
    assert first.completion_tokens == len(CALL)

    sent_back = {"role": "assistant", "content": first.content, "tool_calls": first.tool_calls}
    result = {"role": "tool", "content": "5", "tool_call_id": call["id"]}
    last = await chat.complete([QUESTION, sent_back, result], [ADD])
    assert dialogue.requests[1] == [
        QUESTION,
        {"role": "assistant", "content": CALL},
        {"role": "tool", "content": "5"},
    ]
    assert (last.content, last.tool_calls, last.finish_reason) == ("5", [], "stop")
    assert last.completion_tokens == 1


async def test_an_answer_that_the_environment_changed_is_not_taken_for_the_policys() -> None:
    dialogue = ScriptedDialogue(CALL, "5")
    chat = Chat(dialogue)
    first = await chat.complete([QUESTION], [ADD])

    changed = {"role": "assistant", "content": "I multiply.", "tool_calls": first.tool_calls}
    await chat.complete([QUESTION, changed], [ADD])
    assert dialogue.requests[1][1] == {
        "role": "assistant",
        "content": "I multiply.",
        "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
        ],
    }


async def test_several_calls_of_one_answer_get_ids_of_their_own() -> None:
    chat = Chat(ScriptedDialogue(CALL + CALL, CALL))
    ids = [
        call["id"]
        for answer in (await chat.complete([QUESTION], [ADD]), await chat.complete([], [ADD]))
        for call in answer.tool_calls
    ]
    assert ids == ["call_1", "call_2", "call_3"]


NO_CALLS = ('{"arguments": {}}</tool_call>', "[1]</tool_call>", "{add 2 and 3}</tool_call>", "")


@pytest.mark.parametrize(
    ("text", "tools"),
    [
        *((f"<tool_call>{text}", [ADD]) for text in NO_CALLS),
        (CALL + "<tool_call>{</tool_call>", [ADD]),
        (CALL, []),  # without tools nothing is a call
    ],
)
async def test_text_that_is_no_valid_call_is_content(text: str, tools: list[Any]) -> None:
    answer = await Chat(ScriptedDialogue(text)).complete([QUESTION], tools)
    assert (answer.content, answer.tool_calls, answer.finish_reason) == (text, [], "stop")


async def test_limits_and_stop_texts_of_a_request_reach_the_dialogue() -> None:
    dialogue = ScriptedDialogue("1", "2", "3", cut_off=True)
    chat = Chat(dialogue)
    for sampling in ({"max_tokens": 7, "stop": "\n"}, {"max_completion_tokens": 8}, {}):
        answer = await chat.complete([QUESTION], sampling={**sampling, "temperature": 0.1})
        assert answer.finish_reason == "length"
    reached = [(options["max_tokens"], options["stop"]) for options in dialogue.options]
    assert reached == [(7, ("\n",)), (8, ()), (None, ())]


async def test_a_prompt_that_is_too_long_is_told_from_a_conversation_that_became_too_long() -> None:
    silent, talked = Chat(ScriptedDialogue()), Chat(ScriptedDialogue("5"))
    await talked.complete([QUESTION])
    for chat in (silent, talked):
        with pytest.raises(ContextFull):
            await chat.complete([QUESTION])
    talked.raise_failure()
    with pytest.raises(ContextFull, match="513 tokens"):
        silent.raise_failure()


@pytest.mark.parametrize(
    ("message", "plain"),
    [
        ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
        (
            {"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]},
            {"role": "user", "content": "a\nb"},
        ),
        (
            {"role": "tool", "content": "5", "tool_call_id": "call_1", "name": "add"},
            {"role": "tool", "content": "5", "name": "add"},
        ),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": "2"}]},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": 2}}],
            },
        ),
        ({"role": "user", "content": "a", "tool_calls": None}, {"role": "user", "content": "a"}),
    ],
)
def test_messages_in_the_form_of_chat_templates(message: Any, plain: Any) -> None:
    assert plain_message(message) == plain


@pytest.mark.parametrize("kind", ["image_url", "input_audio"])
def test_images_and_sounds_are_refused_by_name(kind: str) -> None:
    content = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {}}]
    with pytest.raises(ImagesUnsupported, match=f"role user holds a part of the type '{kind}'"):
        plain_message({"role": "user", "content": content})


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
    whole = (await post(endpoint, "whole", tools=[ADD])).json()["choices"][0]
    stream = await post(endpoint, "stream", tools=[ADD], stream=True)

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
