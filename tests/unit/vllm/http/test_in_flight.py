"""Waiting for requests that may use older weights, and ending requests that take too long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from grpo_vllm.http.middleware import InFlight

SCOPE: Scope = {"type": "http", "method": "POST", "path": "/generate"}


class Request:
    """A request to an application that answers when the test allows it. If `begins`, its answer
    begins at once."""

    def __init__(self, in_flight: InFlight, begins: bool = False) -> None:
        self.may_answer = asyncio.Event()
        self.received: list[Message] = []

        async def application(_scope: Scope, _receive: Receive, send: Send) -> None:
            if not begins:
                await self.may_answer.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await self.may_answer.wait()
            await send({"type": "http.response.body", "body": b"ok"})

        async def send(message: Message) -> None:
            self.received.append(message)

        self.task = asyncio.create_task(in_flight.pass_on(application, SCOPE, nothing, send))

    async def finish(self) -> None:
        self.may_answer.set()
        await self.task


async def nothing() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def a_while() -> None:
    """The clock is virtual: this returns when every task waits for an event."""
    await asyncio.sleep(60.0)


async def test_weights_are_free_once_no_request_is_left_that_can_use_them() -> None:
    in_flight = InFlight()
    old = Request(in_flight)
    await a_while()
    former = in_flight.generation
    in_flight.next_generation()
    free = asyncio.create_task(in_flight.finished_up_to(former))
    new = Request(in_flight)
    await a_while()
    assert not free.done()
    await old.finish()
    await a_while()
    assert free.done()
    assert len(in_flight) == 1, "the newer request does not stand in the way"
    await new.finish()
    assert len(in_flight) == 0


@pytest.mark.parametrize("begins", [False, True])
async def test_a_request_that_is_given_up_is_answered_503_or_broken_off(begins: bool) -> None:
    told: list[None] = []
    in_flight = InFlight(on_dropped=lambda: told.append(None))
    request = Request(in_flight, begins=begins)
    await a_while()
    in_flight.give_up_all()
    await request.task
    assert (len(told), len(in_flight)) == (1, 0)
    first: Any = request.received[0]
    if begins:
        assert [message["type"] for message in request.received] == ["http.response.start"]
    else:
        assert (first["status"], dict(first["headers"])[b"connection"]) == (503, b"close")
