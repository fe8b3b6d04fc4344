"""Anthropic's messages API: from a request to `Chat.complete`, and from an answer to JSON or to the
events of a stream.

https://platform.claude.com/docs/en/api/messages
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from grpo_env.bridges.chat import MODEL, Chat, ChatAnswer, ChatMessage, RequestUnusable, reading

REFUSED: Collection[str] = ("container", "mcp_servers")
"""Options that let the provider run something."""
READ: Collection[str] = (
    *("model", "messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences"),
    *("stream", "thread", "metadata", *REFUSED),
)
END = ""
_LEFT_OUT = ("thinking", "redacted_thinking")
"""Blocks that only a hosted model understands."""
_NOT_AN_OBJECT = "INVALID_JSON"
"""The key of arguments that are no object, as the API's documentation advises."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


async def reply(chat: Chat, body: Mapping[str, Any]) -> dict[str, Any]:
    """A `Message` of the API. Raises `RequestUnusable`, and as `Chat.complete`."""
    body, messages, tools = _read(chat, body)
    sampling = {"max_tokens": body.get("max_tokens"), "stop": body.get("stop_sequences")}
    answer = await chat.complete(messages, tools, sampling)
    message: dict[str, Any] = {
        "id": f"msg_{uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [*_content(answer)],
        "stop_reason": _STOP_REASONS[answer.finish_reason],
        "stop_sequence": None,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens},
    }
    if body.get("thread") is not None:
        whole = {"system": body.get("system"), "tools": body.get("tools")}
        chat.stored[message["id"]] = {**whole, "messages": [*body["messages"], message]}
    return message


def count(chat: Chat, body: Mapping[str, Any]) -> dict[str, int]:
    """A `MessageTokensCount` of the API. Raises `RequestUnusable`."""
    _, messages, tools = _read(chat, body)
    return {"input_tokens": chat.count(messages, tools)}


def _read(
    chat: Chat, body: Mapping[str, Any]
) -> tuple[Mapping[str, Any], list[ChatMessage], Sequence[dict[str, Any]]]:
    """The whole request, its messages and its tools."""
    with reading():
        body = _continued(chat, body)
        messages = [message for given in body["messages"] for message in _messages(given)]
        tools = _tools(body)
    if system := body.get("system"):
        messages.insert(0, {"role": "system", "content": system})
    return body, messages, tools


def _continued(chat: Chat, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The whole request: one that continues a thread has only new messages, and neither the system
    text nor the tools."""
    known = (body.get("thread") or {}).get("previous_message_id")
    if known is None:
        return body
    earlier = chat.earlier("message", known)
    return {**body, **earlier, "messages": [*earlier["messages"], *body["messages"]]}


def _messages(given: Mapping[str, Any]) -> Iterator[ChatMessage]:
    """The results of calls are messages of their own, before the rest."""
    content = given["content"]
    blocks: Any = [{"type": "text", "text": content}] if isinstance(content, str) else content
    rest, calls = [], []
    for block in blocks:
        kind = block["type"]
        if kind == "tool_result":
            result = {"content": block.get("content"), "tool_call_id": block["tool_use_id"]}
            yield {"role": "tool", **result}
        elif kind == "tool_use":
            arguments = json.dumps(block["input"].get(_NOT_AN_OBJECT, block["input"]))
            function = {"name": block["name"], "arguments": arguments}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif kind not in _LEFT_OUT:
            rest.append(block)
    if rest or calls:
        yield {"role": given["role"], "content": rest, "tool_calls": calls}


def _tools(body: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    """In the form of the chat completions API."""
    tools = body.get("tools") or ()
    if hosted := sorted({tool.get("type") or "custom" for tool in tools} - {"custom"}):
        raise RequestUnusable(
            f"tools of the type {', '.join(hosted)}: only tools with an input_schema are supported"
        )
    if (body.get("tool_choice") or {}).get("type") == "none":
        return ()
    return [{"type": "function", "function": _function(tool)} for tool in tools]


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    described = {"description": tool["description"]} if tool.get("description") else {}
    return {"name": tool["name"], **described, "parameters": tool["input_schema"]}


def _content(answer: ChatAnswer) -> Iterator[dict[str, Any]]:
    if answer.content or not answer.tool_calls:
        yield {"type": "text", "text": answer.content or ""}
    for call in answer.tool_calls:
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        given = arguments if isinstance(arguments, dict) else {_NOT_AN_OBJECT: arguments}
        yield {"type": "tool_use", "id": call["id"], "name": name, "input": given}


def events(message: Mapping[str, Any], _body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The message as the events of a stream."""
    usage = {**message["usage"], "output_tokens": 0}
    begun = {**message, "content": [], "stop_reason": None, "usage": usage}
    yield {"type": "message_start", "message": begun}
    for index, block in enumerate(message["content"]):
        if block["type"] == "text":
            empty = {**block, "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    end = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": end, "usage": message["usage"]}
    yield {"type": "message_stop"}
