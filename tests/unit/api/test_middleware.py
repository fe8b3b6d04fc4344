"""Each middleware on its own. `test_run_api_operations` tests them over HTTP."""

from __future__ import annotations

import asyncio
import socket

import pytest
from pydantic import SecretStr
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from grpo_api.metrics import Metrics
from grpo_api.middleware import RequestMiddleware
from grpo_core.security import BearerTokenGuard, SameSiteOnly

TOKEN = SecretStr("correct-horse")


def answering(status: int) -> ASGIApp:
    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    return app


async def exchange(app: ASGIApp, *headers: tuple[bytes, bytes], path: str = "/status") -> Message:
    """The start of the answer to a GET request whose body must not be read."""
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
    app = RequestMiddleware(answering(200), asyncio.Event(), Metrics(), [])
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
    answer = await exchange(BearerTokenGuard(answering(200), TOKEN, ()), *headers)
    assert answer["status"] == 401


BROWSER = (b"user-agent", b"Mozilla/5.0 (X11; Linux x86_64)")  # PowerShell gives the same result


def sent_to(host: str, *more: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    return [(b"host", host.encode()), *more]


def fetched(site: str, *more: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """Browsers send this header to loopback addresses and over TLS."""
    return [BROWSER, (b"sec-fetch-site", site.encode()), *more]


@pytest.mark.parametrize(
    ("headers", "passes"),
    [
        ([], True),
        ([(b"user-agent", b"python-httpx/0.28.1"), (b"sec-fetch-mode", b"cors")], True),
        (fetched("none"), True),
        (fetched("same-origin", (b"origin", b"http://127.0.0.1:8000")), True),
        (fetched("cross-site", (b"origin", b"https://ui.example")), True),
        (fetched("cross-site"), False),
        (fetched("same-site", (b"origin", b"http://localhost:3000")), False),
        (sent_to("192.168.0.2:8000", BROWSER), True),
        (sent_to("192.168.0.2:80", (b"origin", b"http://192.168.0.2:80")), True),
        (sent_to("192.168.0.2:80", (b"origin", b"http://192.168.0.2:81")), False),
        (sent_to("192.168.0.2", (b"referer", b"http://elsewhere.example/page")), False),
        (sent_to("192.168.0.2", (b"referer", b"http://192.168.0.2/docs")), True),
        (sent_to("rebound.example:8000"), False),
        (sent_to("rebound.example", *fetched("same-origin")), False),
        (sent_to("rebound.example", (b"origin", b"http://rebound.example")), False),
        (sent_to("rebound.example", (b"origin", b"https://ui.example")), False),
        (sent_to("127.0.0.1.rebound.example"), False),
        (sent_to(socket.gethostname()), True),
        *[
            (sent_to(host), True)
            for host in ("[::1]:8000", "localhost:80", "run-api:8000", "a.ns.svc", "Run.Example.:1")
        ],
        (sent_to("192.168.0.2", (b"origin", b"null")), False),
    ],
)
async def test_what_a_page_elsewhere_sends_is_refused(
    headers: list[tuple[bytes, bytes]], passes: bool
) -> None:
    app = SameSiteOnly(answering(200), ["https://ui.example"], ["run.example"])
    assert (await exchange(app, *headers))["status"] == (200 if passes else 403)


async def test_probes_ask_under_any_name() -> None:
    app = SameSiteOnly(answering(200))
    assert (await exchange(app, *sent_to("any.example"), path="/healthz"))["status"] == 200
