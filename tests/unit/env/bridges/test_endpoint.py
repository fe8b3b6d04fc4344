"""The official client of OpenAI reads every answer of the endpoint."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from structlog.testing import capture_logs

from grpo_core.errors import ServiceUnavailable
from grpo_env.bridges.chat import MODEL, Chat
from grpo_env.bridges.endpoint import ChatEndpoint
from grpo_env.tasks import ContextFull, MessagesUnusable
from tests.unit.env.bridges.scripted import ScriptedDialogue

QUESTION = {"role": "user", "content": "2+3="}
ADD: dict[str, Any] = {"name": "add", "parameters": {"type": "object"}}
CALL = 'I add. <tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
TEXT, ARGUMENTS = "I add.", '{"a": 2, "b": 3}'
OF_CHAT: list[Any] = [{"type": "function", "function": ADD}]
OF_RESPONSES: list[Any] = [{"type": "function", **ADD}]


@pytest.fixture
async def endpoint() -> AsyncIterator[ChatEndpoint]:
    async with ChatEndpoint("Authorization") as endpoint:
        yield endpoint


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    """Plain HTTP: loading certificates takes longer than these tests."""
    async with httpx.AsyncClient(verify=False) as client:
        yield client


def opened(
    endpoint: ChatEndpoint, http: httpx.AsyncClient, *texts: str, **how: Any
) -> tuple[AsyncOpenAI, ScriptedDialogue, Chat]:
    """A rollout whose policy says these texts, and its client."""
    dialogue = ScriptedDialogue(*texts, **how)
    key = f"key-{len(endpoint.sessions)}"
    chat = endpoint.sessions[f"Bearer {key}"] = Chat(dialogue)
    return AsyncOpenAI(base_url=endpoint.url, api_key=key, http_client=http), dialogue, chat


async def test_each_rollout_is_answered_by_its_own_dialogue(
    endpoint: ChatEndpoint, http: httpx.AsyncClient
) -> None:
    rollouts = [opened(endpoint, http, text) for text in ("a says", "b says")]
    calls = (
        client.chat.completions.create(model=MODEL, messages=[QUESTION])  # type: ignore[list-item]
        for client, *_ in rollouts
    )
    first, second = await asyncio.gather(*calls)
    assert [c.choices[0].message.content for c in (first, second)] == ["a says", "b says"]
    assert first.choices[0].finish_reason == "stop"
    assert first.usage
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (1, len("a says"))
    stranger = AsyncOpenAI(base_url=endpoint.url, api_key="other", http_client=http)
    with pytest.raises(openai.AuthenticationError, match="no rollout is open"):
        await stranger.responses.create(model=MODEL, input="a")


async def test_a_stream_of_chat_completions_holds_the_same_answer(
    endpoint: ChatEndpoint, http: httpx.AsyncClient
) -> None:
    client, *_ = opened(endpoint, http, CALL, CALL + CALL.removeprefix(TEXT), "5")
    how: Any = {"model": MODEL, "messages": [QUESTION], "tools": OF_CHAT}
    whole = (await client.chat.completions.create(**how)).choices[0]
    assert (whole.message.content, whole.finish_reason) == (TEXT, "tool_calls")
    assert whole.message.tool_calls
    assert whole.message.tool_calls[0].function.arguments == ARGUMENTS  # type: ignore[union-attr]

    usage = {"stream_options": {"include_usage": True}}
    async with client.chat.completions.stream(**how, **usage) as stream:
        streamed = await stream.get_final_completion()
    (choice,) = streamed.choices
    assert (choice.message.content, choice.finish_reason) == (TEXT, "tool_calls")
    assert choice.message.tool_calls
    assert [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls] == [
        ("call_2", "add", ARGUMENTS),
        ("call_3", "add", ARGUMENTS),
    ]
    assert streamed.usage
    assert streamed.usage.completion_tokens == len(CALL + CALL) - len(TEXT)

    # Without include_usage, every chunk has a choice, which clients read unasked.
    plain = [c async for c in await client.chat.completions.create(**how, stream=True)]
    assert "".join(c.choices[0].delta.content or "" for c in plain) == "5"
    assert plain[-1].choices[0].finish_reason == "stop"


async def test_responses_continue_with_the_exact_text_of_calls(
    endpoint: ChatEndpoint, http: httpx.AsyncClient
) -> None:
    client, dialogue, _ = opened(endpoint, http, CALL, "5")
    how: Any = {"model": MODEL, "instructions": "Be brief.", "tools": OF_RESPONSES}
    asked: list[Any] = [{**QUESTION, "content": [{"type": "input_text", "text": "2+3="}]}]
    first = await client.responses.create(input=asked, max_output_tokens=7, **how)
    said, call = first.output
    assert (first.status, first.output_text, call.type) == ("completed", TEXT, "function_call")
    assert call.arguments == ARGUMENTS
    assert first.usage
    assert first.usage.output_tokens == len(CALL)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
    items = [*asked, *(item.model_dump() for item in (said, call)), result]
    last = await client.responses.create(input=items, **how)
    assert last.output_text == "5"
    assert dialogue.requests[1] == [
        {"role": "system", "content": "Be brief."},
        QUESTION,
        {"role": "assistant", "content": CALL},
        {"role": "tool", "content": "5"},
    ]
    assert [options["max_tokens"] for options in dialogue.options] == [7, None]
    assert dialogue.options[0]["tools"] == OF_CHAT


async def test_a_response_may_go_on_from_the_id_of_an_earlier_one(
    endpoint: ChatEndpoint, http: httpx.AsyncClient
) -> None:
    client, dialogue, _ = opened(endpoint, http, "5", "Yes.")
    first = await client.responses.create(model=MODEL, input="2+3=")
    known = {"previous_response_id": first.id}
    await client.responses.create(model=MODEL, input="Sure?", **known)  # type: ignore[call-overload]
    assert [message["content"] for message in dialogue.requests[1]] == ["2+3=", "5", "Sure?"]
    with pytest.raises(openai.BadRequestError, match="no response of this rollout"):
        await client.responses.create(model=MODEL, input="a", previous_response_id="resp_1")


async def test_a_stream_of_a_response_holds_the_same_answer(
    endpoint: ChatEndpoint, http: httpx.AsyncClient
) -> None:
    client, *_ = opened(endpoint, http, CALL)
    kinds = []
    how: Any = {"model": MODEL, "input": "2+3=", "tools": OF_RESPONSES}
    async with client.responses.stream(**how) as stream:
        async for event in stream:
            kinds.append(event.type)
        response = await stream.get_final_response()
    assert (response.status, response.output_text) == ("completed", TEXT)
    assert response.output[1].arguments == ARGUMENTS  # type: ignore[union-attr]
    text = [f"response.{name}" for name in ("content_part.added", "output_text.delta")]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[2:5] == ["response.output_item.added", *text]
    assert kinds.count("response.function_call_arguments.delta") == 1
    assert kinds[-2:] == ["response.output_item.done", "response.completed"]


async def test_an_answer_that_was_cut_off_is_incomplete(
    endpoint: ChatEndpoint, http: httpx.AsyncClient
) -> None:
    client, *_ = opened(endpoint, http, "2", "2", cut_off=True)
    response = await client.responses.create(model=MODEL, input="2+3=")
    assert response.incomplete_details
    assert (response.status, response.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    stream = await client.responses.create(model=MODEL, input="2+3=", stream=True)
    assert [event.type async for event in stream][-1] == "response.incomplete"


async def test_errors_are_refusals_and_the_first_one_is_kept(
    endpoint: ChatEndpoint, http: httpx.AsyncClient
) -> None:
    class Broken(ScriptedDialogue):
        async def say(self, *_: Any, **__: Any) -> Any:
            raise ServiceUnavailable(f"request {len(self.requests)}")

    client, *_ = opened(endpoint, http)
    session = endpoint.sessions["Bearer broken"] = Chat(Broken())
    broken = AsyncOpenAI(base_url=endpoint.url, api_key="broken", http_client=http)
    for _ in range(2):
        with pytest.raises(openai.BadRequestError):  # clients repeat after a 5xx
            await broken.responses.create(model=MODEL, input="a")
    assert isinstance(session.failed, ServiceUnavailable)

    with pytest.raises(openai.BadRequestError) as full:
        await client.responses.create(model=MODEL, input="a")
    assert full.value.code == "context_length_exceeded"
    assert endpoint.sessions["Bearer key-0"].failed is None


async def test_no_agent_takes_a_refusal_for_a_busy_server(
    endpoint: ChatEndpoint, http: httpx.AsyncClient
) -> None:
    """smolagents looks for these in the text of an error, and then waits for minutes."""

    class Refuses(ScriptedDialogue):
        async def say(self, *_: Any, **__: Any) -> Any:
            raise errors.pop()

    text = "1429 tokens are 503 more than 99: Too Many Requests, rate_limit"
    errors = [kind(text) for kind in (ServiceUnavailable, MessagesUnusable, ContextFull)]
    endpoint.sessions["Bearer key"] = Chat(Refuses())
    client = AsyncOpenAI(base_url=endpoint.url, api_key="key", http_client=http)
    for said in ("than 99", "than 99", "its environment reports why"):
        with pytest.raises(openai.BadRequestError, match=said) as refused:
            await client.responses.create(model=MODEL, input="a")
        assert not re.search("429|503|rate.?limit|too many", str(refused.value), re.IGNORECASE)


IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        ("chat/completions", {}, "expected at least one message"),
        ("chat/completions", {"messages": [{"content": "a"}]}, "KeyError: 'role'"),
        ("chat/completions", {"messages": [QUESTION], "max_tokens": "5"}, "max_tokens: expected"),
        ("chat/completions", {"messages": [IMAGE]}, "a part of the type 'image_url'"),
        ("chat/completions", [], "expected a JSON object"),
        ("responses", {}, "KeyError: 'input'"),
        ("chat/completions", {"messages": [QUESTION], "n": 2}, "expected n=1"),
        *(
            ("chat/completions", {"messages": [QUESTION], **wrong}, problem)
            for wrong, problem in (
                ({"max_completion_tokens": 0, "max_tokens": 5}, "at least 1; got 0"),
                ({"max_tokens": True}, "max_tokens: expected a number of tokens"),
                ({"stop": [1]}, r"stop: expected texts that are not empty; got \[1\]"),
                ({"stop": [""]}, "stop: expected texts"),
                ({"stop": {"a": 1}}, "stop: expected texts"),
                ({"stop": 5}, "stop: expected texts"),
                ({"tools": [{"type": "function"}]}, "KeyError: 'function'"),
                ({"tools": [{"type": "custom", "custom": {}}]}, "tools of the type custom: only"),
                ({"tools": [{"function": {"name": 5}}]}, "tools: expected texts as name and"),
                ({"tools": [{"function": {"name": "f", "description": 5}}]}, "got 'f' and 5"),
            )
        ),
        ("responses", {"input": "a", "tools": [{"type": "function"}]}, "KeyError: 'name'"),
        ("responses", {"input": "a", "tools": [{"type": "web_search"}]}, "tools of .* web_search"),
        ("responses", {"input": "a", "conversation": "conv_1"}, "conversation: not supported"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "'item_reference'"),
        ("completions", {}, "no route /v1/completions; the APIs are chat completions, responses"),
    ],
)
async def test_what_cannot_be_trained_on_is_refused_by_name(
    endpoint: ChatEndpoint, http: httpx.AsyncClient, path: str, body: Any, problem: str
) -> None:
    client, _, chat = opened(endpoint, http, "1")
    with pytest.raises(openai.APIStatusError, match=problem) as refused:
        await client.post(f"/{path}", body=body, cast_to=object)
    assert refused.value.status_code in (400, 404)
    assert (chat.failed, chat.last) == (None, None)


async def test_the_models_are_those_of_the_api(
    endpoint: ChatEndpoint, http: httpx.AsyncClient
) -> None:
    how: Any = {"http_client": http, "_strict_response_validation": True}
    async with AsyncOpenAI(base_url=endpoint.url, api_key="any", **how) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]


async def test_a_body_that_is_not_json_is_refused_as_no_client_repeats_it(
    endpoint: ChatEndpoint, http: httpx.AsyncClient
) -> None:
    *_, chat = opened(endpoint, http, "1")
    headers = {"Authorization": "Bearer key-0"}
    answer = await http.post(f"{endpoint.url}/responses", content=b"{no", headers=headers)
    assert (answer.status_code, chat.failed) == (400, None)
    assert "the body is not JSON" in answer.text


async def test_options_that_have_no_effect_are_logged_once(
    endpoint: ChatEndpoint, http: httpx.AsyncClient
) -> None:
    client, dialogue, _ = opened(endpoint, http, "1", "2", "3")
    asked: Any = {"model": MODEL, "messages": [QUESTION], "tools": OF_CHAT}
    with capture_logs() as logs:
        for choice in ("required", "required", "none"):
            more: Any = {"tool_choice": choice, "extra_body": {"n": None, "top_k": 1}}
            await client.chat.completions.create(**asked, **more, temperature=0.1)
    (line,) = logs
    assert line["event"] == "endpoint.options_ignored"
    assert line["options"] == ["temperature", "top_k", "tool_choice"]
    assert [bool(options["tools"]) for options in dialogue.options] == [True, True, False]
