"""The chat completions API: from a request to `Chat.complete`, and from an answer to JSON or to the
events of a stream.

https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from grpo_env.bridges.chat import MODEL, Chat, RequestUnusable, reading

READ: Collection[str] = (
    *("model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop"),
    *("n", "stream", "stream_options"),
)
REFUSED: Collection[str] = ()
END = "data: [DONE]\n\n"


async def reply(chat: Chat, body: Mapping[str, Any]) -> dict[str, Any]:
    """A `ChatCompletion` of the API. Raises `RequestUnusable`, and as `Chat.complete`."""
    with reading():
        _has_usage(body)
    if (body.get("n") or 1) != 1:
        raise RequestUnusable("expected n=1: an environment asks for one answer at a time")
    tools = () if body.get("tool_choice") == "none" else body.get("tools") or ()
    answer = await chat.complete(body.get("messages") or (), tools, body)
    choice = {"index": 0, "message": answer.message, "finish_reason": answer.finish_reason}
    prompt, completion = answer.prompt_tokens, answer.completion_tokens
    return {
        "id": "chatcmpl-rollout",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        },
    }


def _has_usage(body: Mapping[str, Any]) -> bool:
    """Whether the last event of a stream tells the number of tokens."""
    return bool((body.get("stream_options") or {}).get("include_usage"))


def events(completion: Mapping[str, Any], body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The completion as the events of a stream."""
    head = {name: completion[name] for name in ("id", "object", "created", "model")}
    head["object"] = "chat.completion.chunk"
    [choice] = completion["choices"]
    for delta in _deltas(choice["message"]):
        yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    end = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    yield {**head, "choices": [end]}
    if _has_usage(body):
        yield {**head, "choices": [], "usage": completion["usage"]}


def _deltas(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": None if message["content"] is None else ""}
    if message["content"]:
        yield {"content": message["content"]}
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        begun = {"name": function["name"], "arguments": ""}
        yield {"tool_calls": [{"index": index, **call, "function": begun}]}
        arguments = {"arguments": function["arguments"]}
        yield {"tool_calls": [{"index": index, "function": arguments}]}
