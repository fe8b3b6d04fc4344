"""The layers around the application, one by one. Over HTTP: `test_run_api_operations`."""

from __future__ import annotations

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from grpo_api.bearer_token import BearerTokenMiddleware
from grpo_api.lifetime import Lifetime
from grpo_api.request_log import RequestLogMiddleware

TOKEN = "correct-horse"


def answering(status: int) -> ASGIApp:
    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    return app


async def exchange(app: ASGIApp, *headers: tuple[bytes, bytes], path: str = "/status") -> Message:
    """The start of the answer to a GET whose body never comes."""
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("the body was read")

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode()}
    await app(scope | {"headers": list(headers)}, receive, send)
    return sent[0]


def values(answer: Message, name: bytes) -> list[bytes]:
    return [value for key, value in answer["headers"] if key == name]


@pytest.mark.parametrize("given", [b"x" * 129, b"a\x1bb"])
async def test_a_request_id_that_a_log_cannot_hold_is_replaced(given: bytes) -> None:
    app = RequestLogMiddleware(answering(200), Lifetime())
    (chosen,) = values(await exchange(app, (b"x-request-id", given)), b"x-request-id")
    assert len(chosen) == 32


@pytest.mark.parametrize(
    "given",
    [
        *([], ["Bearer correct-hors"], ["Bearer correct-horse2"], ["Basic correct-horse"]),
        *(["Bearer \xff"], ["Bearer correct-horse", "Bearer correct-horse"]),
    ],
)
async def test_any_other_token_is_refused_and_no_body_is_read(given: list[str]) -> None:
    headers = [(b"authorization", value.encode("latin-1")) for value in given]
    answer = await exchange(BearerTokenMiddleware(answering(200), TOKEN), *headers)
    assert answer["status"] == 401
