"""Answers requests of OpenAI's chat completions API within one rollout: by a call, or through a
server on the loopback interface, for libraries that accept an address and no client object.

Messages, tools and tool calls have the form of that API.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from grpo_env.tasks import Answer, ContextFull, Dialogue, Message
from grpo_env.tasks.tool_calls import divided_by_calls, text_parameters

MODEL = "policy"
_LARGEST_REQUEST_BYTES = 64 * 2**20
ChatMessage = Mapping[str, Any]
"""A message of the chat completions API."""


class ImagesUnsupported(ValueError):
    """A message holds something other than text."""


@dataclass(frozen=True)
class ChatAnswer:
    """What the policy said.

    content: its text without tool calls; None if there is only a tool call.
    tool_calls: in the order of the text.
    finish_reason: `stop`, `length` or `tool_calls`.
    completion_tokens: number of tokens that were sampled for this answer.
    """

    content: str | None
    tool_calls: list[dict[str, Any]]
    finish_reason: str
    completion_tokens: int


class Chat:
    """One rollout. It remembers the exact text of every answer with tool calls, so that the
    conversation continues token by token although the environment sends the calls back parsed.

    failed: the first error of its dialogue that `ChatEndpoint` answered with a refusal.
    """

    def __init__(self, dialogue: Dialogue) -> None:
        self._dialogue = dialogue
        self._texts: dict[str, tuple[ChatMessage, str]] = {}
        self._sampled_tokens = 0
        self._calls = 0
        self._full: ContextFull | None = None
        self.failed: Exception | None = None

    async def complete(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        sampling: Mapping[str, Any] | None = None,
    ) -> ChatAnswer:
        """Let the policy answer.

        Args:
            sampling: `max_tokens` (or `max_completion_tokens`) and `stop` count; the run's options
                set everything else.

        Raises:
            ContextFull: the conversation has no room for another token.
            ImagesUnsupported: a message holds an image or a sound.
        """
        options = sampling or {}
        try:
            answer = await self._dialogue.say(
                [self._as_said(message) for message in messages],
                tools=tools,
                max_tokens=options.get("max_completion_tokens") or options.get("max_tokens"),
                stop=_texts_of(options.get("stop")),
            )
        except ContextFull as error:
            self._full = error
            raise
        new_tokens = len(answer.token_ids) - self._sampled_tokens
        self._sampled_tokens = len(answer.token_ids)
        content, calls = self._parsed(answer, tools) if tools else (str(answer), [])
        if calls:
            said = {"role": "assistant", "content": content, "tool_calls": calls}
            self._texts[calls[0]["id"]] = (plain_message(said), str(answer))
        reason = "length" if not answer.finished else "tool_calls" if calls else "stop"
        return ChatAnswer(content, calls, reason, new_tokens)

    def raise_failure(self) -> None:
        """Raises `failed`; and `ContextFull` if the prompt alone was too long: the policy said
        nothing."""
        if self.failed is not None:
            raise self.failed
        if self._full is not None and not self._sampled_tokens:
            raise self._full

    def _as_said(self, message: ChatMessage) -> Message:
        plain = plain_message(message)
        for call in message.get("tool_calls") or ():
            parsed, text = self._texts.get(call["id"], (None, ""))
            if parsed == plain:
                return {"role": "assistant", "content": text}
        return plain

    def _parsed(
        self, answer: Answer, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str | None, list[dict[str, Any]]]:
        """As vLLM's parsers: if one call is no JSON or has no name, the whole text is content."""
        content, calls = divided_by_calls(answer, text_parameters(tools))
        if not calls or not all(call.name for call in calls):
            return str(answer), []
        listed = []
        for call in calls:
            self._calls += 1
            arguments = call.written if call.error else dict(call.arguments)
            function = {"name": call.name, "arguments": json.dumps(arguments)}
            listed.append({"id": f"call_{self._calls}", "type": "function", "function": function})
        return content.strip() or None, listed


def plain_message(message: ChatMessage) -> Message:
    """A message for the chat template, with its content as text and without empty fields.

    Raises:
        ImagesUnsupported: the message holds an image or a sound.
    """
    plain: dict[str, Any] = {"role": message["role"], "content": _text_of(message)}
    if name := message.get("name"):
        plain["name"] = name
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_template_call(call) for call in calls]
    return plain  # type: ignore[return-value]


def _text_of(message: ChatMessage) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        kind = part.get("type")
        if kind != "text":
            raise ImagesUnsupported(
                f"a message of the role {message['role']} holds a part of the type {kind!r}; only "
                "text is supported, because images cannot be trained on yet"
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _template_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Chat templates expect the arguments as an object, the API sends them as JSON. verifiers' own
    form of a call has name and arguments at the top."""
    function = call.get("function") or call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        arguments = function["arguments"]
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _texts_of(stop: Any) -> Sequence[str]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


class ChatEndpoint:
    """Serves `POST /v1/chat/completions`. Every request names its session in `header`."""

    def __init__(self, header: str) -> None:
        self._header = header
        self.sessions: dict[str, Chat] = {}
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
            answer = await session.complete(body["messages"], body.get("tools") or (), body)
        except ContextFull as error:
            return _refusal(str(error), code="context_length_exceeded")
        except Exception as error:  # noqa: BLE001 - the caller of the rollout raises it
            session.failed = session.failed or error
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
