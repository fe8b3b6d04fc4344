from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from grpo_core.clients.aiohttp_transport import AiohttpTransport
from grpo_core.clients.service import CONNECT_S
from grpo_env.inference.pool import InferencePool
from grpo_env.inference.wait_for_servers import (
    NotAnInferenceServer,
    SharedWeightsHaveOneServer,
    wait_for_servers,
)
from tests.support.wait import wait_for_async
from tests.unit.env.canned import PROMPT, generate_answer
from tests.unit.env.http_stub import Answer, Route, StubServer, stub_server

NOBODY = "http://127.0.0.1:9"
GENEROUS_S = 60.0


def ok(_body: dict[str, Any]) -> Answer:
    return 200, generate_answer(["7"])


def broken(_body: dict[str, Any]) -> Answer:
    return 500, {"detail": "engine died"}


def missing(_body: dict[str, Any]) -> Answer:
    return 404, {"detail": "Not Found"}


@contextmanager
def servers(*generates: Route) -> Iterator[list[StubServer]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(stub_server({"POST /generate": generate})) for generate in generates
        ]


async def test_requests_go_to_the_server_with_the_fewest_under_way() -> None:
    release = threading.Event()

    def slow(body: dict[str, Any]) -> Answer:
        release.wait()
        return ok(body)

    with servers(slow, slow) as (one, two):
        async with InferencePool([one.url, two.url], GENEROUS_S, max_requests=8) as pool:
            work = [asyncio.create_task(pool.generate(PROMPT)) for _ in range(6)]
            try:
                await wait_for_async(lambda: len(one.seen) + len(two.seen) == 6)
            finally:
                release.set()
            await asyncio.gather(*work)
    assert (len(one.seen), len(two.seen)) == (3, 3)


async def test_the_others_take_over_from_one_that_fails_and_is_left_alone_for_a_while() -> None:
    now = [0.0]

    with servers(broken, ok) as (one, two):
        async with InferencePool([one.url, two.url], GENEROUS_S, 8, clock=lambda: now[0]) as pool:
            for _ in range(4):
                await pool.generate(PROMPT, n=1)
            assert (len(one.seen), len(two.seen)) == (1, 4)

            now[0] = 1.0
            await pool.generate(PROMPT, n=1)
    assert (len(one.seen), len(two.seen)) == (2, 5)


async def test_a_server_that_is_gone_does_not_hold_its_requests_back() -> None:
    with servers(ok) as (alive,):
        async with InferencePool([NOBODY, alive.url], math.inf, max_requests=8) as pool:
            await pool.generate(PROMPT, n=1)
    assert len(alive.seen) == 1


@pytest.mark.parametrize("others", [[], [NOBODY]])
async def test_a_completion_may_take_as_long_as_its_request(
    others: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[dict[str, float]] = []

    async def answer(_: object, request: httpx.Request) -> httpx.Response:
        waits.append(request.extensions["timeout"])
        if len(waits) == 1:
            raise httpx.ReadError("", request=request)
        return httpx.Response(200, json=generate_answer(["7"]), request=request)

    monkeypatch.setattr(AiohttpTransport, "handle_async_request", answer)
    async with InferencePool([NOBODY, *others], 7200.0, max_requests=8) as pool:
        await pool.generate(PROMPT)
    first, second = (each["read"] for each in waits)
    assert first == pytest.approx(7200.0, rel=0.1)
    assert second < first  # the remaining time
    assert [each["connect"] for each in waits] == [CONNECT_S] * 2


@contextmanager
def healthy_with(info: Route) -> Iterator[StubServer]:
    routes: dict[str, Route] = {"GET /health": lambda _: (200, {}), "GET /bridge/info": info}
    with stub_server(routes) as server:
        yield server


async def test_something_else_at_the_url_is_not_waited_for() -> None:
    with (
        stub_server({"GET /health": missing}) as server,
        pytest.raises(NotAnInferenceServer, match=f"{server.url} is not vllm-api-server"),
    ):
        await wait_for_servers([server.url], GENEROUS_S)


async def test_weights_that_are_written_in_place_have_one_server() -> None:
    with (
        healthy_with(lambda _: (200, {"shared_weights": True})) as shared,
        healthy_with(lambda _: (200, {"shared_weights": False})) as alone,
        healthy_with(missing) as without_bridge,
    ):
        await wait_for_servers([shared.url], GENEROUS_S)
        await wait_for_servers([alone.url, without_bridge.url], GENEROUS_S)
        with pytest.raises(SharedWeightsHaveOneServer, match=f"weights of {shared.url} in place"):
            await wait_for_servers([alone.url, shared.url], GENEROUS_S)
