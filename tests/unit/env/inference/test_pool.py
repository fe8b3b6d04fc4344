from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from grpo_core.clients.aiohttp_transport import AiohttpTransport
from grpo_core.clients.service import CONNECT_S
from grpo_core.errors import RequestRefused, ServiceUnavailable
from grpo_env.inference import health, server
from grpo_env.inference.health import SharedWeightsHaveOneServer
from grpo_env.inference.pool import InferencePool
from grpo_env.inference.server import Home, NoGenerateRoute
from tests.support.canned import PROMPT, generate_answer
from tests.support.wait import DEADLINE_S, wait_for_async
from tests.unit.env.inference.engine import Engine, engines

GENEROUS_S = 2 * DEADLINE_S


@asynccontextmanager
async def pool_of(
    count: int, deadline_s: float = GENEROUS_S, **options: Any
) -> AsyncIterator[tuple[InferencePool, list[Engine]]]:
    async with (
        engines(count) as servers,
        InferencePool([s.url for s in servers], deadline_s, 100, **options) as pool,
    ):
        yield pool, servers


async def asked(pool: InferencePool, home: Home | None = None, **sampling: Any) -> str:
    """The URL of the server that answered."""
    return (await pool.generate(PROMPT, home, **sampling)).text[0]


def start(pool: InferencePool, home: Home | None = None, **sampling: Any) -> asyncio.Task[str]:
    return asyncio.create_task(asked(pool, home, **sampling))


async def held(engine: Engine, requests: int) -> None:
    await wait_for_async(lambda: len(engine.received) == requests)


def events(logs: list[Any], url: str) -> list[str]:
    return [entry["event"] for entry in logs if entry.get("url") == url]


async def test_a_request_goes_to_the_server_that_samples_the_fewest_sequences() -> None:
    async with pool_of(2) as (pool, (one, two)):
        one.open.clear()
        two.open.clear()
        work = []
        for n in (8, 3, 4, 2, 1):  # loads afterwards: 8 0, 8 3, 8 7, 8 9, 9 9
            work.append(start(pool, n=n))
            await wait_for_async(lambda: len(one.received) + len(two.received) == len(work))
        assert [body["n"] for body in one.received] == [8, 1]
        assert [body["n"] for body in two.received] == [3, 4, 2]
        one.open.set()
        two.open.set()
        await asyncio.gather(*work)


async def test_servers_with_equal_loads_take_turns() -> None:
    async with pool_of(3) as (pool, _):
        assert set(Counter([await asked(pool) for _ in range(6)]).values()) == {2}


async def test_a_server_that_is_gone_is_skipped_and_taken_back_and_each_is_logged_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "_PROBE_EVERY_S", 3600.0)  # a failed request probes at once
    with capture_logs() as logs:
        async with pool_of(2) as (pool, (one, two)):
            await one.vanish()
            answers = await asyncio.gather(*(asked(pool) for _ in range(40)))
            assert set(answers) == {two.url}

            await one.start()
            await wait_for_async(lambda: "server.recovered" in events(logs, one.url))
            assert {await asked(pool), await asked(pool)} == {one.url, two.url}
    assert events(logs, one.url) == ["server.failed", "server.recovered"]
    assert events(logs, two.url) == []
    (failed, _) = (entry for entry in logs if entry.get("url") == one.url)
    assert failed["log_level"] == "warning"
    assert "Connect call failed" in failed["reason"]


async def give_up_requests(engine: Engine) -> None:
    """As a drain that takes too long, before the engine ends."""
    engine.status = engine.health = 503
    engine.open.set()


@pytest.mark.parametrize("interrupt", [Engine.crash, give_up_requests])
async def test_requests_that_a_restart_interrupts_are_repeated_on_another_server(
    interrupt: Any,
) -> None:
    async with pool_of(2) as (pool, (one, two)):
        one.open.clear()
        work = [start(pool) for _ in range(8)]
        await held(one, 4)
        await interrupt(one)
        assert set(await asyncio.gather(*work)) == {two.url}


@pytest.mark.parametrize("interrupt", [Engine.crash, give_up_requests])
async def test_requests_of_the_only_server_wait_until_it_has_restarted(interrupt: Any) -> None:
    with capture_logs() as logs:
        async with pool_of(1) as (pool, (one,)):
            one.open.clear()
            work = [start(pool) for _ in range(4)]
            await held(one, 4)
            await interrupt(one)
            await wait_for_async(lambda: "server.unresponsive" in events(logs, one.url))
            work.append(start(pool))

            one.status = one.health = 200
            one.open.set()
            await one.crash()
            await one.start()
            assert set(await asyncio.gather(*work)) == {one.url}
    # Only expected restarts of an engine happened, so nothing warns.
    assert events(logs, one.url) == ["server.unresponsive", "server.recovered"]


async def test_a_silent_server_keeps_its_requests_for_a_restart_and_then_loses_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "_ATTEMPT_S", 0.1)
    now = [0.0]
    with capture_logs() as logs:
        async with pool_of(2, 1000.0, clock=lambda: now[0]) as (pool, (one, two)):
            one.open.clear()
            two.open.clear()
            work = start(pool)
            await wait_for_async(lambda: one.received or two.received)
            hung, other = (one, two) if one.received else (two, one)
            hung.is_silent = True
            other.open.set()
            await wait_for_async(lambda: "server.unresponsive" in events(logs, hung.url))
            now[0] = 119.0
            assert await asked(pool) == other.url
            assert not work.done()
            now[0] = 121.0
            assert await work == other.url
    assert events(logs, hung.url) == ["server.unresponsive", "server.failed"]


async def test_each_probe_opens_a_connection() -> None:
    """A host that is gone is silent on a connection that was open before."""
    async with pool_of(1) as (_, (one,)):
        await wait_for_async(lambda: len(one.probes) > 2)
    assert len(set(one.probes)) == len(one.probes)


async def test_without_any_server_requests_wait_until_the_deadline() -> None:
    with capture_logs() as logs:
        async with pool_of(2, 0.2) as (pool, (one, two)):
            await one.vanish()
            await two.vanish()
            await wait_for_async(lambda: len(logs) == 2)
            problems = f"{one.url}: .*Connect call failed.*; {two.url}: .*Connect call failed"
            with pytest.raises(
                ServiceUnavailable, match=rf"no server answered within 0.2 s \({problems}"
            ):
                await asked(pool)


async def test_one_request_tries_a_server_that_fails_at_once_while_others_serve() -> None:
    with capture_logs() as logs:
        async with pool_of(2) as (pool, (one, two)):
            one.status = 500
            assert await asked(pool) == two.url
            assert len(one.received) == 1

            one.open.clear()
            two.open.clear()
            probes = len(one.probes)
            await wait_for_async(lambda: len(one.probes) > probes + 2)
            work = [start(pool) for _ in range(10)]
            await held(two, 1 + 9)
            assert len(one.received) == 1 + 1

            one.status = 200
            one.open.set()
            await wait_for_async(lambda: "server.recovered" in events(logs, one.url))
            two.open.set()
            await asyncio.gather(*work)
            assert {await asked(pool), await asked(pool)} == {one.url, two.url}
    assert events(logs, one.url) == ["server.failed", "server.recovered"]


async def test_a_request_that_breaks_every_server_is_sent_to_each_once() -> None:
    async with pool_of(2) as (pool, (one, two)):
        one.status = two.status = 500
        two.open.clear()
        work = start(pool)
        await held(two, 1)
        probes = len(one.probes)
        await wait_for_async(lambda: len(one.probes) > probes + 2)  # it is on trial
        two.open.set()
        with pytest.raises(ServiceUnavailable, match="not now"):
            await work
        assert len(one.received) == len(two.received) == 1


async def test_a_refused_request_is_not_repeated() -> None:
    async with pool_of(2) as (pool, (one, two)):
        one.status, two.status = 422, 404
        with pytest.raises(RequestRefused, match="not now"):
            await asked(pool)
        with pytest.raises(NoGenerateRoute, match=rf"404 Not Found on /generate at {two.url}"):
            await asked(pool)
        assert len(one.received) == len(two.received) == 1


async def test_a_server_that_a_trainer_writes_in_place_is_refused_when_it_appears() -> None:
    async with engines(2) as (one, late):
        await late.vanish()
        async with InferencePool([one.url, late.url], GENEROUS_S, 8) as pool:
            assert await asked(pool) == one.url
            late.shares_weights = True
            await late.start()
            await wait_for_async(lambda: pool._unusable)
            with pytest.raises(SharedWeightsHaveOneServer, match=f"weights of {late.url} in place"):
                await asked(pool)


async def test_a_conversation_stays_on_the_server_of_its_first_answer() -> None:
    async with pool_of(2) as (pool, (one, two)):
        first, second = Home(), Home()
        homes = [await asked(pool, first), await asked(pool, second)]
        assert set(homes) == {one.url, two.url}

        busy = {one.url: two, two.url: one}[homes[1]]  # the first one's server
        busy.open.clear()
        work = [start(pool, first, n=8), start(pool, first)]
        await held(busy, 1 + 2)
        busy.open.set()
        assert await asyncio.gather(*work) == [homes[0]] * 2
        assert [await asked(pool, home) for home in (first, second)] == homes


async def test_a_conversation_waits_while_its_server_restarts() -> None:
    with capture_logs() as logs:
        async with pool_of(2) as (pool, (one, two)):
            home = Home()
            assert await asked(pool, home) == one.url
            one.health = 503
            await wait_for_async(lambda: "server.unresponsive" in events(logs, one.url))
            turn = start(pool, home)
            assert {await asked(pool) for _ in range(4)} == {two.url}
            await one.crash()
            one.health = 200
            await one.start()
            assert await turn == one.url


async def test_a_conversation_whose_server_is_gone_goes_on_at_another() -> None:
    async with pool_of(2) as (pool, (one, two)):
        home = Home()
        assert await asked(pool, home) == one.url
        await one.vanish()
        assert await asked(pool, home) == two.url
        await one.start()
        assert [await asked(pool, home) for _ in range(3)] == [two.url] * 3


@pytest.mark.parametrize("others", [[], ["http://127.0.0.1:10"]])
async def test_a_completion_may_take_as_long_as_its_request(
    others: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[dict[str, float]] = []

    async def answer(_: object, request: httpx.Request) -> httpx.Response:
        if request.url.path != "/generate":
            return httpx.Response(200, json={}, request=request)
        waits.append(request.extensions["timeout"])
        if len(waits) == 1:
            raise httpx.ReadError("", request=request)
        return httpx.Response(200, json=generate_answer(["7"]), request=request)

    monkeypatch.setattr(AiohttpTransport, "handle_async_request", answer)
    async with InferencePool(["http://127.0.0.1:9", *others], 7200.0, max_requests=8) as pool:
        await pool.generate(PROMPT)
    first, second = (each["read"] for each in waits)
    assert first == pytest.approx(7200.0, rel=0.1)
    assert second < first  # the remaining time
    assert [each["connect"] for each in waits] == [CONNECT_S] * 2
