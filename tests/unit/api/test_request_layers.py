"""The layers around the application, one by one. Over HTTP: `test_run_api_operations`."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.testing import capture_logs

from grpo_api import request_log
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


def seen(logs: list[dict[str, object]]) -> list[tuple[object, object]]:
    return [(line["event"], line["status"]) for line in logs]


@pytest.mark.parametrize("given", [b"a", b"x" * 128, b"a/b=c\"'~!"])
async def test_a_request_id_of_the_caller_is_kept(given: bytes) -> None:
    app = RequestLogMiddleware(answering(200), Lifetime())
    assert values(await exchange(app, (b"x-request-id", given)), b"x-request-id") == [given]


@pytest.mark.parametrize("given", [b"", b"x" * 129, b"a b", b"\xc3\xa4", b"a\x1bb"])
async def test_any_other_is_replaced(given: bytes) -> None:
    app = RequestLogMiddleware(answering(200), Lifetime())
    (chosen,) = values(await exchange(app, (b"x-request-id", given)), b"x-request-id")
    assert chosen != given
    assert len(chosen) == 32


async def test_connections_are_closed_once_the_server_is() -> None:
    lifetime = Lifetime()
    app = RequestLogMiddleware(answering(200), lifetime)
    assert values(await exchange(app), b"connection") == []
    lifetime.closing.set()
    assert values(await exchange(app), b"connection") == [b"close"]


@pytest.mark.parametrize(
    ("seconds", "status", "is_held", "level", "event"),
    [
        pytest.param(0.9, 200, False, "debug", "request", id="quick"),
        pytest.param(1.1, 200, False, "warning", "request slow", id="slow"),
        pytest.param(1.1, 200, True, "debug", "request", id="held"),
        pytest.param(0.1, 422, False, "debug", "request", id="refused"),
        pytest.param(1.1, 503, True, "warning", "request failed", id="held and failed"),
    ],
)
async def test_slow_and_failed_requests_are_warnings(
    seconds: float,
    status: int,
    is_held: bool,
    level: str,
    event: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lifetime = Lifetime()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if is_held:
            await lifetime.closes_within(0.0)
        await answering(status)(scope, receive, send)

    monkeypatch.setattr(request_log, "monotonic", iter([100.0, 100.0 + seconds]).__next__)
    with capture_logs() as logs:
        await exchange(RequestLogMiddleware(app, lifetime))
    (line,) = logs
    assert (line["log_level"], line["event"], line["status"]) == (level, event, status)


async def ended_by_the_server(has_begun: bool) -> Message:
    """The answer to a request that the server, which stops, cancels."""

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        if has_begun:
            await answering(200)(scope, receive, send)
        await asyncio.Event().wait()

    task = asyncio.create_task(exchange(RequestLogMiddleware(endless, Lifetime())))
    await asyncio.sleep(0)
    task.cancel()
    return await task


async def test_a_request_that_outlasts_the_shutdown_is_503() -> None:
    with capture_logs() as logs:
        answer = await ended_by_the_server(has_begun=False)
    assert answer["status"] == 503
    assert values(answer, b"retry-after") == [b"1"]
    assert len(values(answer, b"x-request-id")) == 1
    assert seen(logs) == [("request failed", 503)]


async def test_an_answer_that_has_begun_is_cut_off_then() -> None:
    with capture_logs() as logs, pytest.raises(asyncio.CancelledError):
        await ended_by_the_server(has_begun=True)
    assert seen(logs) == [("request failed", 500)]


@pytest.mark.parametrize("given", ["Bearer correct-horse", "bearer correct-horse"])
async def test_the_token_opens(given: str) -> None:
    app = BearerTokenMiddleware(answering(200), TOKEN)
    assert (await exchange(app, (b"authorization", given.encode())))["status"] == 200


@pytest.mark.parametrize(
    "given",
    [
        *([], ["Bearer "], ["Bearer correct-hors"], ["Bearer correct-horse2"]),
        *(["Bearer CORRECT-HORSE"], ["Basic correct-horse"], ["correct-horse"], ["Bearer \xff"]),
        ["Bearer correct-horse", "Bearer correct-horse"],
    ],
)
async def test_nothing_else_does_and_no_body_is_read(given: list[str]) -> None:
    headers = [(b"authorization", value.encode("latin-1")) for value in given]
    answer = await exchange(BearerTokenMiddleware(answering(200), TOKEN), *headers)
    assert answer["status"] == 401
    assert values(answer, b"www-authenticate") == [b"Bearer"]
