"""Which requests may still use older weights, and giving up on those that take too long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from grpo_vllm.in_flight import InFlight, InFlightCounter

SCOPE: Scope = {"type": "http", "method": "POST", "path": "/generate"}


class Application:
    """Answers once it is let; the first half of the answer before that, where asked."""

    def __init__(self, begins: bool = False) -> None:
        self.let = asyncio.Event()
        self._begins = begins

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        start: Message = {"type": "http.response.start", "status": 200, "headers": []}
        if self._begins:
            await send(start)
        await self.let.wait()
        if not self._begins:
            await send(start)
        await send({"type": "http.response.body", "body": b"ok"})


async def nothing() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


class Client:
    def __init__(self) -> None:
        self.received: list[Message] = []

    async def send(self, message: Message) -> None:
        self.received.append(message)

    @property
    def status(self) -> Any:
        return self.received[0]["status"]


async def started(counter: InFlightCounter, client: Client) -> asyncio.Task[None]:
    task = asyncio.create_task(counter(SCOPE, nothing, client.send))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


async def test_weights_are_free_once_no_request_is_left_that_can_use_them() -> None:
    in_flight, application = InFlight(), Application()
    counter = InFlightCounter(application, in_flight)
    old = await started(counter, Client())
    former = in_flight.generation
    in_flight.next_generation()
    free = asyncio.create_task(in_flight.finished_up_to(former))
    newer = Application()
    new = await started(InFlightCounter(newer, in_flight), Client())
    await asyncio.sleep(0.01)
    assert not free.done()
    application.let.set()
    await old
    await asyncio.wait_for(free, 1.0)
    assert len(in_flight) == 1  # the newer request did not stand in the way
    newer.let.set()
    await new


@pytest.mark.parametrize("begins", [False, True])
async def test_what_is_given_up_is_answered_503_or_broken_off(begins: bool) -> None:
    told: list[None] = []
    in_flight = InFlight(on_dropped=lambda: told.append(None))
    client = Client()
    request = await started(InFlightCounter(Application(begins), in_flight), client)
    in_flight.give_up_all()
    await request
    assert (in_flight.dropped, len(told), len(in_flight)) == (1, 1, 0)
    if begins:
        assert [message["type"] for message in client.received] == ["http.response.start"]
    else:
        headers = dict(client.received[0]["headers"])
        assert (client.status, headers[b"connection"]) == (503, b"close")


async def test_a_server_that_cancels_a_request_ends_the_work_on_it() -> None:
    in_flight, application = InFlight(), Application()
    request = await started(InFlightCounter(application, in_flight), Client())
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert len(in_flight) == 0


async def test_errors_of_the_application_come_through() -> None:
    async def broken(_scope: Scope, _receive: Receive, _send: Send) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await InFlightCounter(broken, InFlight())(SCOPE, nothing, Client().send)


async def test_what_samples_nothing_is_not_counted() -> None:
    in_flight, application = InFlight(), Application()
    counter = InFlightCounter(application, in_flight)
    scope = {**SCOPE, "method": "GET", "path": "/bridge/info"}
    task = asyncio.create_task(counter(scope, nothing, Client().send))
    await asyncio.sleep(0)
    assert len(in_flight) == 0
    application.let.set()
    await task
