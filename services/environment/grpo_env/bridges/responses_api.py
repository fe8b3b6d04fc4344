"""The responses API: from a request to `Chat.complete`, and from an answer to JSON or to the events
of a stream.

https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from grpo_env.bridges.chat import (
    MODEL,
    Chat,
    ChatAnswer,
    ChatMessage,
    RequestUnusable,
    reading,
    require_functions,
)

REFUSED: Collection[str] = ("conversation", "prompt", "background")
"""Options that need something stored elsewhere, or a request that goes on without its client."""
READ: Collection[str] = (
    *("model", "input", "instructions", "previous_response_id", "tools", "tool_choice", "stream"),
    *("max_output_tokens", "metadata", *REFUSED),
)
END = ""
_LEFT_OUT = ("reasoning", "compaction")
"""Items of the input that only a hosted model understands."""


async def reply(chat: Chat, body: Mapping[str, Any]) -> dict[str, Any]:
    """A `Response` of the API. Raises `RequestUnusable`, and as `Chat.complete`."""
    with reading():
        known = body.get("previous_response_id")
        earlier = () if known is None else chat.earlier("response", known)
        messages = [*earlier, *_messages(body["input"])]
        tools = () if body.get("tool_choice") == "none" else _tools(body)
    instructions = body.get("instructions")
    opening = [{"role": "system", "content": instructions}] if instructions else []
    answer = await chat.complete(
        [*opening, *messages], tools, {"max_tokens": body.get("max_output_tokens")}
    )
    response = _response(body, answer)
    chat.stored[response["id"]] = [*messages, answer.message]
    return response


def _messages(given: str | Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """The input as messages. Calls join the assistant's message before them, as one answer of the
    policy held them."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    found: list[dict[str, Any]] = []
    for item in given:
        kind = item.get("type", "message")
        if kind == "message":
            found.append({"role": item["role"], "content": item["content"]})
        elif kind == "function_call":
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": None})
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            found[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = {"content": item["output"], "tool_call_id": item["call_id"]}
            found.append({"role": "tool", **output})
        elif kind not in _LEFT_OUT:
            raise RequestUnusable(f"the input holds an item of the type {kind!r}: not supported")
    return [*found]


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """In the form of the chat completions API."""
    tools = body.get("tools") or ()
    require_functions(tools)
    names = ("name", "description", "parameters")
    return [
        {"type": "function", "function": {name: tool[name] for name in names if tool.get(name)}}
        for tool in tools
    ]


def _response(body: Mapping[str, Any], answer: ChatAnswer) -> dict[str, Any]:
    is_whole = answer.finish_reason != "length"
    prompt, completion = answer.prompt_tokens, answer.completion_tokens
    return {
        "id": f"resp_{uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": MODEL,
        "status": "completed" if is_whole else "incomplete",
        "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
        "error": None,
        "output": [*_output(answer)],
        "instructions": body.get("instructions"),
        "previous_response_id": body.get("previous_response_id"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + completion,
        },
    }


def _output(answer: ChatAnswer) -> Iterator[dict[str, Any]]:
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    if answer.content or not answer.tool_calls:
        part = {"type": "output_text", "text": answer.content or "", "annotations": []}
        yield {
            "id": f"msg_{uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [part],
        }
    for call in answer.tool_calls:
        yield {
            "id": f"fc_{uuid4().hex}",
            "type": "function_call",
            "call_id": call["id"],
            **call["function"],
            "status": status,
        }


def events(response: Mapping[str, Any], _body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The response as the events of a stream."""
    for number, event in enumerate(_events(response)):
        yield {**event, "sequence_number": number}


def _events(response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    begun["incomplete_details"] = None
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(response["output"]):
        is_message = item["type"] == "message"
        empty: dict[str, Any] = {"content": []} if is_message else {"arguments": ""}
        added = {**item, **empty, "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": added}
        place = {"item_id": item["id"], "output_index": index}
        if is_message:
            [part] = item["content"]
            here = {**place, "content_index": 0}
            yield {"type": "response.content_part.added", **here, "part": {**part, "text": ""}}
            said = {**here, "logprobs": []}
            yield {"type": "response.output_text.delta", **said, "delta": part["text"]}
            yield {"type": "response.output_text.done", **said, "text": part["text"]}
            yield {"type": "response.content_part.done", **here, "part": part}
        else:
            call = {name: item[name] for name in ("name", "arguments")}
            arguments = "response.function_call_arguments"
            yield {"type": f"{arguments}.delta", **place, "delta": item["arguments"]}
            yield {"type": f"{arguments}.done", **place, **call}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{response['status']}", "response": response}
