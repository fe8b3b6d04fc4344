"""An OpenAI-compatible server on the loopback interface, through which the policy answers.

For libraries that accept the address of a server and no client object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from grpo_env.bridges.chat import Chat, ChatAnswer
from grpo_env.tasks import ContextFull

MODEL = "policy"
_LARGEST_REQUEST_BYTES = 64 * 2**20


@dataclass
class OpenRollout:
    """One rollout. `error`: the first error of its dialogue, which the caller raises again."""

    chat: Chat
    error: Exception | None = None


class ChatEndpoint:
    """Serves `POST /v1/chat/completions`. Every request names its session in `header`."""

    def __init__(self, header: str) -> None:
        self._header = header
        self.sessions: dict[str, OpenRollout] = {}
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> ChatEndpoint:
        app = web.Application(client_max_size=_LARGEST_REQUEST_BYTES)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("*", "/{path:.*}", self._unknown)
        # A rollout that is given up also ends its request to the inference server.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        session = self.sessions.get(request.headers.get(self._header, ""))
        if session is None:
            return _refusal(f"no rollout is open for the header {self._header}", status=404)
        body = await request.json()
        if body.get("n", 1) != 1:
            return _refusal("expected n=1: an environment asks for one answer at a time")
        try:
            answer = await session.chat.complete(body["messages"], body.get("tools") or (), body)
        except ContextFull as error:
            return _refusal(str(error), code="context_length_exceeded")
        except Exception as error:  # noqa: BLE001 - the caller of the rollout raises it
            session.error = session.error or error
            return _refusal(f"{type(error).__name__}: {error}")
        if body.get("stream"):
            return web.Response(body=_events(answer), content_type="text/event-stream")
        return web.json_response(_completion(answer))

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _unknown(self, request: web.Request) -> web.Response:
        return _refusal(
            f"no route {request.path}; only the chat completions API can be trained on", status=404
        )


def _refusal(message: str, status: int = 400, code: str | None = None) -> web.Response:
    """400 by default, because clients of OpenAI repeat requests that end with 5xx."""
    error = {"message": message, "type": "invalid_request_error", "code": code}
    return web.json_response({"error": error}, status=status)


def _completion(answer: ChatAnswer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.tool_calls:
        message["tool_calls"] = answer.tool_calls
    choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason}
    return {**_head("chat.completion"), "choices": [choice], "usage": _usage(answer)}


def _events(answer: ChatAnswer) -> bytes:
    """The whole answer as one event of a stream, then its end."""
    delta: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.tool_calls:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(answer.tool_calls)]
    choice = {"index": 0, "delta": delta, "finish_reason": answer.finish_reason}
    head = _head("chat.completion.chunk")
    chunks: list[Mapping[str, Any]] = [
        {**head, "choices": [choice]},
        {**head, "choices": [], "usage": _usage(answer)},
    ]
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + (
        b"data: [DONE]\n\n"
    )


def _head(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-rollout", "object": kind, "created": 0, "model": MODEL}


def _usage(answer: ChatAnswer) -> dict[str, int]:
    tokens = answer.completion_tokens
    # The number of the prompt's tokens is not known here; libraries only report it.
    return {"prompt_tokens": 0, "completion_tokens": tokens, "total_tokens": tokens}
