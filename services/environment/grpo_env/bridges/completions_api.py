"""The chat completions API: from a request to `Chat.complete`, and from an answer to JSON or to the
events of a stream.

https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_env.bridges.chat import MODEL, Chat, ChatAnswer, RequestUnusable, reading

READ = (
    *("model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop"),
    *("n", "stream", "stream_options"),
)
"""Options of a request. All others change nothing: the policy is sampled as the run says."""


async def complete(chat: Chat, body: Mapping[str, Any]) -> ChatAnswer:
    """Raises `RequestUnusable`, and as `Chat.complete`."""
    if (body.get("n") or 1) != 1:
        raise RequestUnusable("expected n=1: an environment asks for one answer at a time")
    tools = () if body.get("tool_choice") == "none" else body.get("tools") or ()
    return await chat.complete(body.get("messages") or (), tools, body)


def whole(answer: ChatAnswer) -> dict[str, Any]:
    """The answer as one object."""
    choice = {"index": 0, "message": answer.message, "finish_reason": answer.finish_reason}
    return {**_head("chat.completion"), "choices": [choice], "usage": _usage(answer)}


def has_usage(body: Mapping[str, Any]) -> bool:
    """Whether the last event of a stream tells the number of tokens. Raises `RequestUnusable`."""
    with reading():
        return bool((body.get("stream_options") or {}).get("include_usage"))


def events(answer: ChatAnswer, has_usage: bool) -> bytes:
    """The answer as the events of a stream."""
    head = _head("chat.completion.chunk")
    chunks: list[dict[str, Any]] = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        for delta in _deltas(answer)
    ]
    end = {"index": 0, "delta": {}, "finish_reason": answer.finish_reason}
    chunks.append({**head, "choices": [end]})
    if has_usage:
        chunks.append({**head, "choices": [], "usage": _usage(answer)})
    lines = (b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)
    return b"".join(lines) + b"data: [DONE]\n\n"


def _deltas(answer: ChatAnswer) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": None if answer.content is None else ""}
    if answer.content:
        yield {"content": answer.content}
    for index, call in enumerate(answer.tool_calls):
        function = call["function"]
        begun = {"name": function["name"], "arguments": ""}
        yield {"tool_calls": [{"index": index, **call, "function": begun}]}
        arguments = {"arguments": function["arguments"]}
        yield {"tool_calls": [{"index": index, "function": arguments}]}


def _head(kind: str) -> dict[str, Any]:
    created = int(time.time())
    return {"id": "chatcmpl-rollout", "object": kind, "created": created, "model": MODEL}


def _usage(answer: ChatAnswer) -> dict[str, int]:
    prompt, completion = answer.prompt_tokens, answer.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
