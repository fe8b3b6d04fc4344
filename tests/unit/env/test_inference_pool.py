from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from grpo_core.errors import ProtocolViolation, RequestRefused, ServiceUnavailable
from grpo_core.inference_client import GenerateAnswer
from grpo_env.inference_health import (
    HealthClient,
    NotAnInferenceServer,
    SharedWeightsHaveOneServer,
    wait_for_servers,
)
from grpo_env.inference_pool import InferencePool, NoGenerateRoute
from tests.unit.env.canned import PROMPT, generate_answer
from tests.unit.env.http_stub import Answer, DropConnection, Route, StubServer, stub_server

NOBODY = "http://127.0.0.1:9"


def ok(_body: dict[str, Any]) -> Answer:
    return 200, generate_answer(["7"])


def broken(_body: dict[str, Any]) -> Answer:
    return 500, {"detail": "engine died"}


@contextmanager
def servers(*generates: Route) -> Iterator[list[StubServer]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(stub_server({"POST /generate": generate})) for generate in generates
        ]


async def generate(*urls: str, deadline_s: float = 60.0, times: int = 1) -> list[GenerateAnswer]:
    async with InferencePool(urls, deadline_s, max_requests=8) as pool:
        return [await pool.generate(PROMPT, n=1) for _ in range(times)]


async def test_requests_go_to_the_server_with_the_fewest_under_way() -> None:
    release = threading.Event()

    def slow(body: dict[str, Any]) -> Answer:
        release.wait(60)
        return ok(body)

    with servers(slow, slow) as (one, two):
        async with InferencePool([one.url, two.url], 60.0, max_requests=8) as pool:
            work = [asyncio.create_task(pool.generate(PROMPT)) for _ in range(6)]
            async with asyncio.timeout(60):
                while len(one.seen) + len(two.seen) < 6:
                    await asyncio.sleep(0.01)
            release.set()
            await asyncio.gather(*work)
    assert (len(one.seen), len(two.seen)) == (3, 3)


async def test_the_others_take_over_from_one_that_fails_and_is_left_alone_for_a_while() -> None:
    now = [0.0]

    with servers(broken, ok) as (one, two):
        async with InferencePool([one.url, two.url], 60.0, 8, clock=lambda: now[0]) as pool:
            for _ in range(4):
                await pool.generate(PROMPT, n=1)
            assert (len(one.seen), len(two.seen)) == (1, 4)

            now[0] = 1.0
            await pool.generate(PROMPT, n=1)
    assert (len(one.seen), len(two.seen)) == (2, 5)


async def test_one_that_is_gone_costs_its_requests_no_more_than_a_short_wait() -> None:
    with servers(ok) as (alive,):
        async with asyncio.timeout(60):
            await generate(NOBODY, alive.url, deadline_s=300.0)


async def test_none_that_works_is_an_error_with_the_reason() -> None:
    with (
        servers(broken, broken) as (one, two),
        pytest.raises(ServiceUnavailable, match="engine died"),
    ):
        await generate(one.url, two.url)


async def test_a_request_that_is_refused_is_not_tried_elsewhere() -> None:
    with servers(lambda _body: (422, {"detail": "n"}), ok) as (one, two):
        with pytest.raises(RequestRefused):
            await generate(one.url, two.url)
        assert two.seen == []


async def test_a_server_without_generate_is_named_as_what_it_is_not() -> None:
    with servers(lambda _body: (404, {"detail": "Not Found"})) as (stock,):
        with pytest.raises(NoGenerateRoute) as failure:
            await generate(stock.url + "/v1")
        assert f"404 Not Found on /generate at {stock.url}" in str(failure.value)
        assert "not the URL of vllm-api-server (stock vLLM has no /generate)" in str(failure.value)


async def test_a_server_that_asks_for_patience_or_drops_the_connection_gets_another_try() -> None:
    trouble = iter([(503, {"detail": "awaiting weights"}, {"retry-after": "1"}), DropConnection()])

    def generate_at_last(body: dict[str, Any]) -> Answer:
        answer = next(trouble, None)
        if isinstance(answer, DropConnection):
            raise answer
        return answer or ok(body)

    with servers(generate_at_last) as (server,):
        started = asyncio.get_running_loop().time()
        await generate(server.url)
        assert asyncio.get_running_loop().time() - started >= 1.0
        assert len(server.seen) == 3


async def test_health_is_waited_for() -> None:
    answers = iter([503, 500])

    def health(_body: dict[str, Any]) -> Answer:
        return next(answers, 200), {}

    with stub_server({"GET /health": health}) as server:
        await wait_for_servers([server.url + "/v1"], deadline_s=60.0)


async def test_waiting_for_health_has_an_end_that_names_the_url() -> None:
    with pytest.raises(ServiceUnavailable, match=rf"{NOBODY} not healthy after 0\.1 s.*check --op"):
        await wait_for_servers([NOBODY + "/v1"], deadline_s=0.1)


async def test_what_the_server_said_is_named_where_it_says_nothing_in_the_end() -> None:
    let_go = threading.Event()

    def health(_body: dict[str, Any]) -> Answer:
        if len(server.seen) == 1:
            client._http.timeout = httpx.Timeout(0.2)  # of those that follow
            return 503, {"detail": "loading"}
        let_go.wait(60)
        return 200, {}

    with stub_server({"GET /health": health}) as server:
        async with HealthClient(server.url) as client:
            with pytest.raises(ServiceUnavailable, match=r"answered 503: .*loading.*; read its"):
                await client.wait_until_healthy(1.0)
        let_go.set()


async def test_something_else_at_the_url_is_not_waited_for() -> None:
    def missing(_body: dict[str, Any]) -> Answer:
        return 404, {"detail": "Not Found"}

    with (
        stub_server({"GET /health": missing}) as server,
        pytest.raises(NotAnInferenceServer, match=f"{server.url} is not the URL of vllm-api-serv"),
    ):
        await wait_for_servers([server.url], deadline_s=60.0)


def server_with_info(status: int, info: dict[str, Any]) -> dict[str, Route]:
    return {"GET /health": lambda _: (200, {}), "GET /bridge/info": lambda _: (status, info)}


async def test_weights_that_are_written_in_place_have_one_server() -> None:
    shared = server_with_info(200, {"shared_weights": True})
    alone = server_with_info(200, {"shared_weights": False})
    without_bridge = server_with_info(404, {})
    with (
        stub_server(shared) as one,
        stub_server(alone) as two,
        stub_server(without_bridge) as three,
    ):
        await wait_for_servers([one.url], deadline_s=60.0)
        await wait_for_servers([two.url, three.url], deadline_s=60.0)
        with pytest.raises(SharedWeightsHaveOneServer, match=f"{one.url} gets its weights written"):
            await wait_for_servers([two.url, one.url], deadline_s=60.0)


async def test_an_answer_that_is_no_bridge_info_is_named() -> None:
    strange = server_with_info(200, {"shared_weights": "perhaps"})
    with stub_server(strange) as one, pytest.raises(ProtocolViolation, match="/bridge/info"):
        await wait_for_servers([one.url, one.url + "/v1"], deadline_s=60.0)
