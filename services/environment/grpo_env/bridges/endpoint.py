"""Serves the APIs of OpenAI and Anthropic to the programs of rollouts: each request reaches the
policy through the rollout that it names.

It has `POST /v1/chat/completions`, `POST /v1/responses`, `POST /v1/messages`, its `/count_tokens`,
and `GET /v1/models`.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import structlog
from aiohttp import web
from aiohttp.http_exceptions import PayloadEncodingError
from pydantic_core import from_json

from grpo_core.listening import LOOPBACK
from grpo_env.bridges import completions_api, messages_api, responses_api
from grpo_env.bridges.chat import MODEL, Chat, LimitReached, RequestUnusable
from grpo_env.tasks import ContextFull, MessagesUnusable

log = structlog.get_logger()

CONTEXT_FULL = "context_length_exceeded"
"""OpenAI's code of an error."""
_MISREAD = re.compile(r"\b\d{3,}\b|rate[\s_-]*limit|too many requests", re.IGNORECASE)
"""Agents look for them in the text of an error: in "1429 tokens", smolagents reads the status 429
and waits for minutes."""
_LARGEST_REQUEST_BYTES = 64 * 2**20
_Body = Mapping[str, Any]


class _Api(Protocol):
    """One of the modules that answer requests of a provider's API."""

    READ: Collection[str]
    """Options of a request. Others change nothing: the policy is sampled as the run says."""
    REFUSED: Collection[str]
    """Options that must not be set."""
    END: str
    """Behind the events of a stream."""

    async def reply(self, chat: Chat, body: _Body, /) -> dict[str, Any]: ...

    def events(self, reply: _Body, body: _Body, /) -> Iterable[dict[str, Any]]: ...


_APIS: Mapping[str, _Api] = {
    "chat/completions": completions_api,
    "responses": responses_api,
    "messages": messages_api,
}
Answered = Callable[[_Api, Chat, _Body], Awaitable[web.Response]]


class HeldOpen:
    """Holds a context open in one task, as some must be closed by the task that opened them.

    Args: opened: makes the context
    """

    def __init__(self, opened: Callable[[], AbstractAsyncContextManager[object]]) -> None:
        self._opened = opened
        self._is_open = asyncio.Event()
        self._holding: asyncio.Task[None] | None = None

    async def wait(self) -> None:
        """Wait until the context is open. Raises its errors."""
        if self._holding is None:
            self._holding = asyncio.create_task(self._hold())
        waiting = asyncio.create_task(self._is_open.wait())
        await asyncio.wait({self._holding, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._holding.done():
            self._holding.result()

    async def _hold(self) -> None:
        async with self._opened():
            self._is_open.set()
            await asyncio.Event().wait()

    def close(self) -> None:
        """Close the context as soon as its event loop runs again."""
        if self._holding is not None:
            self._holding.cancel()


class ChatEndpoint:
    """Every request names its rollout in a header.

    url: its address on this machine, which ends in /v1.

    Args: header: for `Authorization`, the keys of `sessions` begin with "Bearer "
    """

    def __init__(self, header: str) -> None:
        self._header = header
        self._ignored: set[str] = set()  # options of requests that were logged
        self.sessions: dict[str, Chat] = {}
        self.url = ""
        app = web.Application(client_max_size=_LARGEST_REQUEST_BYTES)
        for path, api in _APIS.items():
            app.router.add_post(f"/v1/{path}", partial(self._handle, api, _reply))
        counted = partial(self._handle, messages_api, _count)
        app.router.add_post("/v1/messages/count_tokens", counted)
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("*", "/{path:.*}", self._unknown)
        # A rollout that is given up also ends its request to the inference server.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)

    async def __aenter__(self) -> ChatEndpoint:
        await self._runner.setup()
        await web.TCPSite(self._runner, LOOPBACK, 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/v1"
        return self

    async def listen_at(self, socket: Path) -> None:
        """Serve programs without a network too, at a Unix socket."""
        await web.UnixSite(self._runner, str(socket)).start()

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _handle(
        self, api: _Api, answered: Answered, request: web.Request
    ) -> web.StreamResponse:
        # Many clients of Anthropic's API send the key alone, in a header of their own.
        given = request.headers
        keys = (given.get(self._header, ""), f"Bearer {given.get('x-api-key')}")
        chat = next((self.sessions[key] for key in keys if key in self.sessions), None)
        if chat is None:
            return _refusal(
                f"no rollout is open for the header {self._header}", 401, "invalid_api_key"
            )
        try:
            body = await _body_of(request)
        except web.HTTPRequestEntityTooLarge as error:
            return _refusal(str(error.text), 413)
        except RequestUnusable as error:
            return _refusal(str(error))
        ignored = [name for name in _ignored(body, api.READ) if name not in self._ignored]
        if ignored:
            self._ignored.update(ignored)
            log.warning(
                "endpoint.options_ignored",
                options=ignored,
                effect="the policy is sampled as the options of the run say",
            )
        if refused := [name for name in api.REFUSED if body.get(name)]:
            return _refusal(f"{', '.join(refused)}: not supported for a rollout; omit it")
        return await _answer(answered, api, chat, body)

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "created": int(time.time()), "owned_by": "grpo"}
        return web.json_response({"object": "list", "data": [model]})

    async def _unknown(self, request: web.Request) -> web.Response:
        return _refusal(
            f"no route {request.path}; the APIs are chat completions, responses and messages", 404
        )


async def _body_of(request: web.Request) -> dict[str, Any]:
    """Raises `RequestUnusable`."""
    try:
        body = from_json(await request.read())
    except (ValueError, PayloadEncodingError, web.RequestPayloadError) as error:
        raise RequestUnusable(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestUnusable("expected a JSON object as the body")
    return body


def _ignored(body: Mapping[str, Any], read: Collection[str]) -> Iterable[str]:
    yield from (name for name, value in body.items() if name not in read and value is not None)
    # Its calls are the policy's own choice, so that every token has the logprob that it was
    # sampled with.
    choice = body.get("tool_choice")
    if (choice.get("type") if isinstance(choice, dict) else choice) not in (None, "auto", "none"):
        yield "tool_choice"


async def _answer(answered: Answered, api: _Api, chat: Chat, body: _Body) -> web.Response:
    try:
        return await answered(api, chat, body)
    except ContextFull as error:
        return _refusal(str(error), code=CONTEXT_FULL)
    except LimitReached as error:
        return _refusal(str(error), code="rollout_limit_reached")
    except (RequestUnusable, MessagesUnusable) as error:
        return _refusal(str(error))
    except Exception as error:  # noqa: BLE001 - the caller of the rollout raises it
        chat.fail(error)
        return _refusal("the rollout has failed; its environment reports why")


async def _reply(api: _Api, chat: Chat, body: _Body) -> web.Response:
    found = await api.reply(chat, body)
    if not body.get("stream"):
        return web.json_response(found)
    events = [(event.get("type"), json.dumps(event)) for event in api.events(found, body)]
    lines = [(f"event: {kind}\n" if kind else "") + f"data: {data}\n\n" for kind, data in events]
    return web.Response(body="".join([*lines, api.END]), content_type="text/event-stream")


async def _count(_api: _Api, chat: Chat, body: _Body) -> web.Response:
    return web.json_response(messages_api.count(chat, body))


def _refusal(message: str, status: int = 400, code: str | None = None) -> web.Response:
    """The error of all APIs; the outer type is Anthropic's. 400 by default, because clients repeat
    requests that end with 5xx."""
    said = _MISREAD.sub("...", message)
    error = {"message": said, "type": "invalid_request_error", "code": code}
    return web.json_response({"type": "error", "error": error}, status=status)
