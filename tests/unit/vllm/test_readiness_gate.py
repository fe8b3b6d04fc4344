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
HOLD_S = 20.0


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
    def refused_because(self) -> str:
        """Of a 503."""
        assert self.received[0]["status"] == 503
        reason: str = json.loads(self.body)["detail"]
        return reason

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.received[1:])

    @property
    def untaken(self) -> int:
        return self._incoming.qsize()


class Asking:
    """One request to an application behind a gate."""

    def __init__(self, refusal: Refusal | None, client: Client | None = None) -> None:
        self.application, self.barrier = Application(), Barrier(refusal)
        self.client = client or Client()
        self._gate = ReadinessGate(self.application, self.barrier, HOLD_S)

    async def done(self, path: str, method: str = "POST", kind: str = "http") -> Client:
        scope: dict[str, Any] = {"type": kind, "path": path, "method": method, "headers": []}
        await self._gate(scope, self.client.receive, self.client.send)
        return self.client

    async def held(self, path: str = "/generate") -> asyncio.Task[Client]:
        """Returns when the request has been held for nearly as long as it may be."""
        task = asyncio.create_task(self.done(path))
        await asyncio.sleep(HOLD_S - 1.0)
        assert self.client.received == []
        assert self.application.bodies == []
        return task


async def test_everything_passes_piece_by_piece_while_it_is_open() -> None:
    client = await Asking(None, Client([b"a", b"b"])).done("/generate")
    assert (client.received[0]["status"], client.body) == (200, b"ab")
    assert len(client.received) == 3


@pytest.mark.parametrize("refusal", [WAITING, GIVEN_UP])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", "/v1/models"), ("OPTIONS", "/generate"), ("POST", "/tokenize")),
        *(("POST", "/bridge/pause"), ("POST", "/lora/load"), ("POST", "/v1/load_lora_adapter")),
    ],
)
async def test_requests_that_sample_nothing_always_pass(
    refusal: Refusal, method: str, path: str
) -> None:
    client = await Asking(refusal).done(path, method)
    assert client.received[0]["status"] == 200


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/ping"])
async def test_health_says_no_at_once_and_why(path: str) -> None:
    asking = Asking(WAITING)
    async with asyncio.timeout(HOLD_S / 2):
        client = await asking.done(path, "GET")
    assert client.refused_because == "weights are missing"
    assert asking.application.bodies == []


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/not/known/yet"])
async def test_generation_is_held_until_it_opens(path: str) -> None:
    asking = Asking(WAITING, Client([b"the ", b"body"]))
    request = await asking.held(path)
    asking.barrier.become(None)
    client = await request
    assert (client.received[0]["status"], client.body) == (200, b"the body")


async def test_a_hold_ends_with_503_and_says_when_to_come_back() -> None:
    asking = Asking(WAITING)
    client = await (await asking.held())
    assert client.refused_because == "weights are missing"
    assert dict(client.received[0]["headers"])[b"retry-after"] == b"2"
    assert asking.application.bodies == []


async def test_giving_up_ends_every_hold_and_nobody_is_held_any_more() -> None:
    asking = Asking(WAITING)
    request = await asking.held()
    asking.barrier.become(GIVEN_UP)
    assert (await request).refused_because == "nobody came"
    async with asyncio.timeout(HOLD_S / 2):
        assert (await Asking(GIVEN_UP).done("/generate")).refused_because == "nobody came"


async def test_a_client_that_leaves_ends_its_hold() -> None:
    asking = Asking(WAITING, Client([b"x"]))
    request = await asking.held()
    asking.client.leave()
    assert (await request).received == []
    assert asking.application.bodies == []


async def test_a_long_body_is_not_taken_in_while_it_is_held() -> None:
    part = b"x" * LOOKAHEAD_BYTES
    asking = Asking(WAITING, Client([part] * 5))
    request = await asking.held()
    assert asking.client.untaken == 3
    asking.barrier.become(None)
    assert (await request).body == part * 5


async def test_websockets_are_turned_away() -> None:
    client = await Asking(WAITING).done("/v1/realtime", kind="websocket")
    assert client.received == [{"type": "websocket.close", "code": 1013}]


async def test_the_lifespan_of_the_application_passes() -> None:
    asking = Asking(GIVEN_UP)
    await asking.done("", kind="lifespan")
    assert asking.application.bodies == [b""]
