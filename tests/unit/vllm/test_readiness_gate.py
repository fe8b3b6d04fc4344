"""The gate in front of the application: what passes, what is held, what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from grpo_vllm.readiness_gate import LOOKAHEAD_BYTES, ReadinessGate, Refusal

WAITING = Refusal("weights are missing", hold=True)
GIVEN_UP = Refusal("nobody came", hold=False)


class Barrier:
    def __init__(self, refusal: Refusal | None) -> None:
        self._refusal = refusal
        self._changed = asyncio.Event()

    def refusal(self) -> Refusal | None:
        return self._refusal

    async def wait(self, at_most_s: float) -> None:
        try:
            async with asyncio.timeout(at_most_s):
                await self._changed.wait()
        except TimeoutError:
            pass

    def become(self, refusal: Refusal | None) -> None:
        self._refusal = refusal
        self._changed.set()


class Application:
    """Reads the whole body and answers with it, in two pieces."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", scope["type"] == "http"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Client:
    """One connection: sends `parts` of a body, then nothing, or leaves."""

    def __init__(self, parts: Iterable[bytes] = (b"",)) -> None:
        parts = list(parts)
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        for i, part in enumerate(parts, start=1):
            more = i < len(parts)
            self._incoming.put_nowait({"type": "http.request", "body": part, "more_body": more})
        self.received: list[Message] = []

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def receive(self) -> Message:
        return await self._incoming.get()

    async def send(self, message: Message) -> None:
        self.received.append(message)

    @property
    def status(self) -> int:
        status: int = self.received[0]["status"]
        return status

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.received[1:])

    @property
    def untaken(self) -> int:
        return self._incoming.qsize()


def http(path: str, method: str = "POST") -> dict[str, Any]:
    return {"type": "http", "path": path, "method": method, "headers": []}


@pytest.fixture
def application() -> Application:
    return Application()


async def ask(
    application: Application,
    barrier: Barrier,
    scope: dict[str, Any],
    client: Client,
    hold_s: float = 0.05,
) -> Client:
    async with asyncio.timeout(30.0):
        await ReadinessGate(application, barrier, hold_s)(scope, client.receive, client.send)
    return client


async def test_everything_passes_while_it_is_open(application: Application) -> None:
    client = await ask(application, Barrier(None), http("/generate"), Client([b"a", b"b"]))
    assert (client.status, client.body) == (200, b"ab")


@pytest.mark.parametrize("refusal", [WAITING, GIVEN_UP])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("OPTIONS", "/generate"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("POST", "/bridge/pause"),
        ("POST", "/bridge/resume"),
        ("GET", "/bridge/info"),
    ],
)
async def test_what_samples_nothing_passes_always(
    application: Application, refusal: Refusal, method: str, path: str
) -> None:
    client = await ask(application, Barrier(refusal), http(path, method), Client())
    assert client.status == 200


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/ping"])
async def test_health_says_no_at_once_and_why(application: Application, path: str) -> None:
    client = await ask(application, Barrier(WAITING), http(path, "GET"), Client(), hold_s=60.0)
    assert client.status == 503
    assert json.loads(client.body) == {"detail": "weights are missing"}
    assert application.bodies == []


@pytest.mark.parametrize(
    "path",
    ["/generate", "/v1/completions", "/v1/chat/completions", "/invocations", "/not/known/yet"],
)
async def test_generation_is_held_until_it_opens(application: Application, path: str) -> None:
    barrier, client = Barrier(WAITING), Client([b"the ", b"body"])
    asking = asyncio.create_task(ask(application, barrier, http(path), client, hold_s=60.0))
    await asyncio.sleep(0.02)
    assert client.received == []
    assert application.bodies == []
    barrier.become(None)
    await asking
    assert (client.status, client.body) == (200, b"the body")


async def test_a_hold_ends_with_503_and_says_when_to_come_back(application: Application) -> None:
    client = await ask(application, Barrier(WAITING), http("/generate"), Client([b"x"]))
    assert client.status == 503
    assert dict(client.received[0]["headers"])[b"retry-after"] == b"2"
    assert application.bodies == []


async def test_giving_up_ends_every_hold(application: Application) -> None:
    barrier, client = Barrier(WAITING), Client()
    asking = asyncio.create_task(ask(application, barrier, http("/generate"), client, hold_s=60.0))
    await asyncio.sleep(0.02)
    barrier.become(GIVEN_UP)
    await asking
    assert (client.status, json.loads(client.body)) == (503, {"detail": "nobody came"})


async def test_where_nothing_will_change_soon_nobody_is_held(application: Application) -> None:
    client = await ask(application, Barrier(GIVEN_UP), http("/generate"), Client(), hold_s=60.0)
    assert client.status == 503


async def test_a_client_that_leaves_is_let_go(application: Application) -> None:
    client = Client([b"x"])
    asking = asyncio.create_task(
        ask(application, Barrier(WAITING), http("/generate"), client, hold_s=60.0)
    )
    await asyncio.sleep(0.02)
    client.leave()
    await asking
    assert client.received == []
    assert application.bodies == []


async def test_a_long_body_is_not_taken_in_while_it_is_held(application: Application) -> None:
    part = b"x" * LOOKAHEAD_BYTES
    barrier, client = Barrier(WAITING), Client([part] * 5)
    asking = asyncio.create_task(ask(application, barrier, http("/generate"), client, hold_s=60.0))
    await asyncio.sleep(0.02)
    assert client.untaken == 3
    barrier.become(None)
    await asking
    assert client.body == part * 5


async def test_an_answer_is_not_held_back(application: Application) -> None:
    """Streams go through piece by piece, after a hold as well."""
    client = await ask(application, Barrier(None), http("/generate"), Client([b"x"]))
    assert [m["type"] for m in client.received].count("http.response.body") == 2


async def test_websockets_are_turned_away(application: Application) -> None:
    scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    client = await ask(application, Barrier(WAITING), scope, Client())
    assert client.received == [{"type": "websocket.close", "code": 1013}]


async def test_the_lifespan_of_the_application_passes(application: Application) -> None:
    await ask(application, Barrier(GIVEN_UP), {"type": "lifespan"}, Client())
    assert application.bodies == [b""]
