"""The layers around the application, one by one. Over HTTP: `test_run_api_operations`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.testing import capture_logs

from grpo_api import request_log
from grpo_api.bearer_token import BearerTokenMiddleware
from grpo_api.lifetime import Lifetime
from grpo_api.request_log import RequestLogMiddleware

TOKEN = "correct-horse"


async def ok(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def exchange(app: ASGIApp, *headers: tuple[bytes, bytes], path: str = "/status") -> Message:
    """The start of the answer to a GET whose body never comes."""
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("the body was read")

    async def send(message: Message) -> None:
        sent.append(message)

    scope: dict[str, Any] = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "headers": list(headers),
    }
    await app(scope, receive, send)
    return sent[0]


def values(answer: Message, name: bytes) -> list[bytes]:
    return [value for key, value in answer["headers"] if key == name]


@pytest.mark.parametrize("given", [b"a", b"x" * 128, b"a/b=c\"'~!", b"00-4bf92f35-7a"])
async def test_a_request_id_of_the_caller_is_kept(given: bytes) -> None:
    answer = await exchange(RequestLogMiddleware(ok, Lifetime()), (b"x-request-id", given))
    assert values(answer, b"x-request-id") == [given]


@pytest.mark.parametrize("given", [b"", b"x" * 129, b"a b", b"a\tb", b"\xc3\xa4", b"a\x1bb"])
async def test_any_other_is_replaced(given: bytes) -> None:
    answer = await exchange(RequestLogMiddleware(ok, Lifetime()), (b"x-request-id", given))
    (chosen,) = values(answer, b"x-request-id")
    assert chosen != given
    assert len(chosen) == 32


async def test_connections_are_closed_once_the_server_is() -> None:
    lifetime = Lifetime()
    app = RequestLogMiddleware(ok, lifetime)
    assert values(await exchange(app), b"connection") == []
    lifetime.closing.set()
    assert values(await exchange(app), b"connection") == [b"close"]


def clock(*times: float) -> Callable[[], float]:
    remaining = iter(times)
    return lambda: next(remaining)


@pytest.mark.parametrize(
    ("seconds", "status", "wait_s", "level", "event"),
    [
        (0.9, 200, None, "debug", "request"),
        (1.1, 200, None, "warning", "request slow"),
        (1.1, 200, 0.0, "debug", "request"),
        (0.1, 422, None, "debug", "request"),
        (0.1, 503, None, "warning", "request failed"),
        (1.1, 503, 0.0, "warning", "request failed"),
    ],
    ids=["quick", "slow", "held", "refused", "failed", "held and failed"],
)
async def test_what_is_worth_a_warning(
    seconds: float,
    status: int,
    wait_s: float | None,
    level: str,
    event: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lifetime = Lifetime()

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        if wait_s is not None:
            await lifetime.closes_within(wait_s)
        await send({"type": "http.response.start", "status": status, "headers": []})

    monkeypatch.setattr(request_log, "monotonic", clock(100.0, 100.0 + seconds))
    with capture_logs() as logs:
        await exchange(RequestLogMiddleware(app, lifetime))
    (line,) = logs
    assert (line["log_level"], line["event"], line["status"]) == (level, event, status)


async def test_a_defect_is_reported_as_failed_and_passed_on() -> None:
    async def broken(_scope: Scope, _receive: Receive, _send: Send) -> None:
        raise ZeroDivisionError

    with capture_logs() as logs, pytest.raises(ZeroDivisionError):
        await exchange(RequestLogMiddleware(broken, Lifetime()))
    assert [(line["event"], line["status"]) for line in logs] == [("request failed", 500)]


async def test_a_request_that_outlasts_the_shutdown_is_503() -> None:
    async def endless(_scope: Scope, _receive: Receive, _send: Send) -> None:
        await asyncio.Event().wait()

    with capture_logs() as logs:
        task = asyncio.create_task(exchange(RequestLogMiddleware(endless, Lifetime())))
        await asyncio.sleep(0)
        task.cancel()
        answer = await task
    assert answer["status"] == 503
    assert values(answer, b"retry-after") == [b"1"]
    assert len(values(answer, b"x-request-id")) == 1
    assert [(line["event"], line["status"]) for line in logs] == [("request failed", 503)]


async def test_an_answer_that_has_begun_is_cut_off_then() -> None:
    async def endless(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.Event().wait()

    with capture_logs() as logs:
        task = asyncio.create_task(exchange(RequestLogMiddleware(endless, Lifetime())))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert [(line["event"], line["status"]) for line in logs] == [("request failed", 500)]


@pytest.mark.parametrize("given", ["Bearer correct-horse", "bearer correct-horse"])
async def test_the_token_opens(given: str) -> None:
    app = BearerTokenMiddleware(ok, TOKEN)
    assert (await exchange(app, (b"authorization", given.encode())))["status"] == 200


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["Bearer"],
        ["Bearer "],
        ["Bearer correct-hors"],
        ["Bearer correct-horse2"],
        ["Bearer CORRECT-HORSE"],
        ["Basic correct-horse"],
        ["correct-horse"],
        ["Bearer correct-horse", "Bearer correct-horse"],
        ["Bearer \xff"],
    ],
)
async def test_nothing_else_does_and_no_body_is_read(given: list[str]) -> None:
    headers = [(b"authorization", value.encode("latin-1")) for value in given]
    answer = await exchange(BearerTokenMiddleware(ok, TOKEN), *headers)
    assert answer["status"] == 401
    assert values(answer, b"www-authenticate") == [b"Bearer"]


@pytest.mark.parametrize(
    ("path", "status"),
    [("/healthz", 200), ("/readyz", 200), ("/health", 200), ("/healthz/", 401), ("/metrics", 401)],
)
async def test_probes_need_none(path: str, status: int) -> None:
    assert (await exchange(BearerTokenMiddleware(ok, TOKEN), path=path))["status"] == status
