"""Which requests pass the readiness gate, are held or refused; which are in flight; a draining
server waits for requests, not for a client that never finishes one; the API key."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any

import httpx
import pytest
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from grpo_core.settings import load_settings
from grpo_core.tree.server import ServerSettings
from grpo_core.weights.servers import ServerState, ServerStatus
from grpo_vllm import http_server
from grpo_vllm.http_server import DrainingServer, require_api_key
from grpo_vllm.middleware import GateRefusal, InFlight, ReadinessGate
from grpo_vllm.supervisor.main import health_app

AN_HOUR_S = 3600.0
KEY = SecretStr("one-key")
GUARDED = ("/generate", "/bridge/info", "/bridge/pause", "/lora/load", "/v1/models", "/docs")


async def ok(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.mark.parametrize("rest", [b"Content-Le", b"Content-Length: 9\r\n\r\nhalf"])
async def test_half_a_request_does_not_hold_up_a_drain(
    rest: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "UNFINISHED_S", 0.0)
    listening = socket.create_server(("127.0.0.1", 0))
    in_flight = InFlight()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await in_flight.pass_on(ok, scope, receive, send)

    server = DrainingServer(app)
    running = asyncio.create_task(server.serve(sockets=[listening]))
    await server.adopt([])  # waits for the start
    reader, writer = await asyncio.open_connection(*listening.getsockname())
    writer.write(b"POST /generate HTTP/1.1\r\nHost: localhost\r\n" + rest)
    await writer.drain()
    while not any(connection.in_request for connection in server.server_state.connections):
        await asyncio.sleep(0.01)
    server.drain(AN_HOUR_S, lambda _: None, in_flight)
    await running
    assert b"200" not in await reader.read()
    writer.close()


async def status(app: object, path: str, *words: str) -> int:
    transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        headers = {"authorization": " ".join(words)} if words else {}
        return (await client.get(path, headers=headers)).status_code


async def test_every_route_asks_for_the_key_but_those_of_probes() -> None:
    routes = [Route("/{rest:path}", lambda _: Response())]
    app = require_api_key(Starlette(routes=routes), KEY)
    for path in GUARDED:
        assert await status(app, path, "Bearer", "one-key") == 200
        for wrong in ((), ("Bearer", "one"), ("Basic", "one-key")):
            assert await status(app, path, *wrong) == 401
    assert [await status(app, path) for path in ("/health", "/metrics")] == [200, 200]
    assert await status(require_api_key(Starlette(routes=routes), None), "/generate") == 200
    settings = load_settings(ServerSettings, ["--model", "m", "--api-key", "one-key"])
    serving = ServerStatus(name="a", state=ServerState.SERVING, epoch=0, step=0)
    supervisor = health_app(lambda: serving, lambda: True, settings)
    assert [await status(supervisor, path) for path in ("/healthz", "/readyz")] == [200, 200]
    assert await status(supervisor, "/status") == 401
    assert await status(supervisor, "/weights/1-5/model.safetensors") == 401
    assert await status(supervisor, "/status", "Bearer", "one-key") == 200


WAITING = GateRefusal("weights are missing", hold=True)
GIVEN_UP = GateRefusal("nobody came", hold=False)
HOLD_S = 20.0


class Asking:
    """One request to the gate, with a body in `parts`. The application behind the gate answers with
    the whole body."""

    def __init__(self, refusal: GateRefusal | None, *parts: bytes) -> None:
        self._refusal, self._changed = refusal, asyncio.Event()
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        for i, part in enumerate(parts or [b""], 1):
            message = {"type": "http.request", "body": part, "more_body": i < len(parts)}
            self._incoming.put_nowait(message)
        self.received: list[Message] = []
        self.answered = False

    async def wait(self, at_most_s: float) -> None:
        assert at_most_s > 0, "the hold is over"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at_most_s):
                await self._changed.wait()

    def become(self, refusal: GateRefusal | None) -> None:
        self._refusal = refusal
        self._changed.set()

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def done(self, path: str = "/generate", method: str = "POST") -> Asking:
        async def send(message: Message) -> None:
            self.received.append(message)

        scope: Scope = {"type": "http", "path": path, "method": method, "headers": []}
        gate = ReadinessGate(self._application, lambda: self._refusal, self.wait, HOLD_S)
        await gate(scope, self._incoming.get, send)
        return self

    async def held(self, path: str = "/generate") -> asyncio.Task[Asking]:
        """Returns when the request has been held for nearly the longest allowed time."""
        task = asyncio.create_task(self.done(path))
        await asyncio.sleep(HOLD_S - 1.0)
        assert (task.done(), self.received, self.answered) == (False, [], False)
        return task

    async def _application(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.answered = True
        await Response(await Request(scope, receive).body())(scope, receive, send)

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.received[1:])

    @property
    def refused_because(self) -> str:
        """The reason in an answer with status 503, given without the application."""
        assert (self.received[0]["status"], self.answered) == (503, False)
        reason: str = json.loads(self.body)["detail"]
        return reason


async def test_requests_that_sample_nothing_pass_and_health_says_no_at_once_and_why() -> None:
    posts = ("/tokenize", "/bridge/pause", "/lora/load")
    for refusal in (WAITING, GIVEN_UP):
        for method, path in (("GET", "/v1/models"), *(("POST", path) for path in posts)):
            assert (await Asking(refusal).done(path, method)).answered, path
    async with asyncio.timeout(HOLD_S / 2):
        for path in ("/health", "/ping"):
            asking = await Asking(WAITING).done(path, "GET")
            assert asking.refused_because == "weights are missing"


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
async def test_generation_is_held_until_it_opens(path: str) -> None:
    asking = Asking(WAITING, b"the ", b"body")
    request = await asking.held(path)
    asking.become(None)
    assert (await request).body == b"the body"


async def test_a_hold_ends_with_503_and_says_when_to_come_back() -> None:
    asking = await (await Asking(WAITING).held())
    assert asking.refused_because == "weights are missing"
    assert dict(asking.received[0]["headers"])[b"retry-after"] == b"2"


async def test_giving_up_ends_every_hold_and_nobody_is_held_any_more() -> None:
    asking = Asking(WAITING)
    request = await asking.held()
    asking.become(GIVEN_UP)
    assert (await request).refused_because == "nobody came"
    async with asyncio.timeout(HOLD_S / 2):
        assert (await Asking(GIVEN_UP).done()).refused_because == "nobody came"


async def test_a_client_that_leaves_ends_its_hold() -> None:
    asking = Asking(WAITING, b"x")
    request = await asking.held()
    asking.leave()
    async with asyncio.timeout(0.5):  # of the remaining second
        assert (await request).received == []
    assert not asking.answered


class Flight:
    """A request whose answer begins at once, and ends when `may_end` is set."""

    def __init__(self, in_flight: InFlight) -> None:
        self.may_end = asyncio.Event()
        self.received: list[str] = []

        async def application(_scope: Scope, _receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await self.may_end.wait()
            await send({"type": "http.response.body", "body": b"ok"})

        async def send(message: Message) -> None:
            self.received.append(message["type"])

        scope: Scope = {"type": "http", "method": "POST", "path": "/generate"}
        receive = asyncio.Event().wait  # the client sends nothing more
        passing = in_flight.pass_on(application, scope, receive, send)  # type: ignore[arg-type]
        self.task = asyncio.create_task(passing)


async def until_all_wait() -> None:
    """The clock is virtual: this returns when every task waits for an event."""
    await asyncio.sleep(60.0)


async def test_weights_are_free_once_no_request_is_left_that_can_use_them() -> None:
    in_flight = InFlight()
    old = Flight(in_flight)
    await until_all_wait()
    free = asyncio.create_task(in_flight.finished_up_to(in_flight.next_cohort() - 1))
    new = Flight(in_flight)
    await until_all_wait()
    assert not free.done()
    old.may_end.set()
    await until_all_wait()
    assert free.done()
    assert len(in_flight) == 1, "the newer request does not stand in the way"
    new.may_end.set()
    await new.task
    assert len(in_flight) == 0


async def test_an_answer_that_is_given_up_is_broken_off() -> None:
    """`test_supervisor.py` has one that has not begun, which gets status 503."""
    dropped: list[None] = []
    in_flight = InFlight(on_dropped=lambda: dropped.append(None))
    request = Flight(in_flight)
    await until_all_wait()
    in_flight.give_up_all()
    await request.task
    assert (len(dropped), len(in_flight), request.received) == (1, 0, ["http.response.start"])
