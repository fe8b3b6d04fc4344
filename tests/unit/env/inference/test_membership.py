"""Servers join and leave a pool: those that run-api lists, and the addresses of a name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.run_api import ListedServer
from grpo_env.inference import pool as inference_pool
from grpo_env.inference.places import NamedServers, Place
from grpo_env.inference.pool import InferencePool
from grpo_env.inference.server import Home
from tests.support.wait import DEADLINE_S, wait_for_async
from tests.unit.env.inference.engine import Engine, engines
from tests.unit.env.inference.test_pool import asked, events, held, start

GENEROUS_S = 2 * DEADLINE_S


def entry(engine: Engine, step: int = 5, state: str = "serving", name: str = "") -> ListedServer:
    version = PolicyVersion(1, step)
    return ListedServer(name=name or engine.url, url=engine.url, version=version, state=state)


async def listed(pool: InferencePool, *entries: ListedServer) -> None:
    """Return once the pool follows the list."""

    def follows() -> bool:
        pool.follow(entries)
        return all(any(s.listed == one for s in pool.servers) for one in entries)

    await wait_for_async(follows)
    for server in pool.servers:
        await server.probed.wait()


@asynccontextmanager
async def pool_on(count: int, *, named: int = 1) -> AsyncIterator[tuple[InferencePool, Any]]:
    """A pool that knows only the first servers."""
    async with (
        engines(count) as servers,
        InferencePool([s.url for s in servers[:named]], GENEROUS_S, 100) as pool,
    ):
        yield pool, servers


async def test_a_listed_server_is_probed_and_then_used() -> None:
    with capture_logs() as logs:
        async with pool_on(2) as (pool, (one, two)):
            two.health = 503
            await listed(pool, entry(one), entry(two))
            assert {await asked(pool) for _ in range(4)} == {one.url}
            two.health = 200
            await wait_for_async(lambda: "server.recovered" in events(logs, two.url))
            assert {await asked(pool), await asked(pool)} == {one.url, two.url}
            pool.log_requests()
    assert events(logs, two.url)[0] == "server.joined"
    [counted] = [
        line for line in logs if line["event"] == "server.requests" if line["requests"] < 5
    ]
    assert (counted["url"], counted["versions"]) == (two.url, {"1.0": 1})


async def test_the_newest_version_is_preferred_and_older_ones_help() -> None:
    """One step less counts as twice the load, so that no server is idle while versions spread."""
    async with pool_on(2) as (pool, (old, new)):
        await listed(pool, entry(old, step=4), entry(new, step=5))
        assert {await asked(pool) for _ in range(4)} == {new.url}
        old.open.clear()
        new.open.clear()
        old.received.clear()
        new.received.clear()
        work = []
        for _ in range(6):
            work.append(start(pool))
            await wait_for_async(lambda: len(old.received) + len(new.received) == len(work))
        assert (len(old.received), len(new.received)) == (2, 4)
        old.open.set()
        new.open.set()
        await asyncio.gather(*work)


async def test_an_answer_tells_a_newer_version_than_the_list() -> None:
    async with pool_on(2) as (pool, (one, two)):
        await listed(pool, entry(one, step=4), entry(two, step=4))
        two.version = (1, 9)
        assert {await asked(pool), await asked(pool)} == {one.url, two.url}
        assert {await asked(pool) for _ in range(4)} == {two.url}


@pytest.mark.parametrize("state", ["starting", "joining", "behind", "failed", "a new word"])
async def test_a_server_that_does_not_serve_gets_no_request(state: str) -> None:
    async with pool_on(2) as (pool, (one, two)):
        conversation = Home()
        await listed(pool, entry(one), entry(two, state="committing"))
        assert {await asked(pool), await asked(pool, conversation)} == {one.url, two.url}
        home, other = (one, two) if one.url == await asked(pool, conversation) else (two, one)
        await listed(pool, entry(home, state=state), entry(other))
        assert {await asked(pool) for _ in range(4)} == {other.url}
        assert await asked(pool, conversation) == other.url


@pytest.mark.parametrize("state", ["draining", "restarting"])
async def test_a_server_that_restarts_keeps_its_conversations_alone(state: str) -> None:
    async with pool_on(2) as (pool, (one, two)):
        conversation = Home()
        await listed(pool, entry(one), entry(two))
        home, other = (one, two) if one.url == await asked(pool, conversation) else (two, one)
        await listed(pool, entry(home, state=state), entry(other, step=1))
        assert {await asked(pool) for _ in range(4)} == {other.url}
        assert await asked(pool, conversation) == home.url
        await listed(pool, entry(home, state=state), entry(other, state=state))
        assert {await asked(pool) for _ in range(2)} == {one.url, two.url}


async def test_requests_of_a_server_that_leaves_the_list_are_repeated_elsewhere() -> None:
    with capture_logs() as logs:
        async with pool_on(2) as (pool, (one, two)):
            conversation = Home()
            await listed(pool, entry(one, step=1), entry(two))
            assert await asked(pool, conversation) == two.url
            two.open.clear()
            work = [start(pool, conversation), start(pool)]
            await held(two, 1 + 2)
            await listed(pool, entry(one, step=1))
            assert await asyncio.gather(*work) == [one.url] * 2
            two.open.set()
            await listed(pool, entry(one, step=1), entry(two))
            await wait_for_async(lambda: len(pool.places) == 2)
            assert await asked(pool) == two.url
    membership = [event for event in events(logs, two.url) if event != "server.requests"]
    assert membership == ["server.joined", "server.left", "server.joined"]


async def test_an_empty_list_says_nothing() -> None:
    """Redis may have lost its data; the servers report again within a second."""
    async with pool_on(2) as (pool, (one, two)):
        await listed(pool, entry(one), entry(two))
        pool.follow(())
        assert {await asked(pool), await asked(pool)} == {one.url, two.url}


async def test_the_only_server_gets_its_requests_whatever_the_list_says() -> None:
    async with pool_on(1) as (pool, (one,)):
        await listed(pool, entry(one, state="joining"))
        assert await asked(pool) == one.url


async def test_a_server_with_two_urls_is_one_server() -> None:
    async with pool_on(1) as (pool, (one,)):
        one.name = "gpu3-9001"
        elsewhere = "http://gpu3.example:9001"
        both = entry(one, name=one.name), entry(one, step=7)
        await listed(pool, both[0].model_copy(update={"url": elsewhere}))
        assert pool.places == [Place(one.url)]
        await listed(pool, both[1].model_copy(update={"url": f"http://localhost:{one.port}/v1/"}))
        assert pool.places == [Place(one.url)]


async def test_a_listed_server_may_move() -> None:
    async with pool_on(3) as (pool, (one, two, three)):
        await listed(pool, entry(one), entry(two, name="b"))
        await two.vanish()
        await listed(pool, entry(one), entry(three, name="b"))
        assert {await asked(pool), await asked(pool)} == {one.url, three.url}
        await wait_for_async(lambda: len(pool.servers) == 2)  # the old place is closed


async def test_a_pool_lasts_while_its_first_server_is_gone() -> None:
    async with pool_on(2) as (pool, (one, two)):
        await listed(pool, entry(one), entry(two))
        await one.vanish()
        assert {await asked(pool) for _ in range(4)} == {two.url}
        await listed(pool, entry(two))
        await one.start()
        assert {await asked(pool) for _ in range(4)} == {two.url}
        await listed(pool, entry(one), entry(two))
        await wait_for_async(lambda: len(pool.places) == 2)
        assert {await asked(pool), await asked(pool)} == {one.url, two.url}


async def test_a_part_of_the_pool_answers_alone_until_it_is_gone() -> None:
    async with pool_on(3, named=3) as (pool, (one, two, three)):
        part = frozenset({Place(one.url), Place(two.url)})
        assert {await asked(pool, only=part) for _ in range(6)} == {one.url, two.url}
        await one.vanish()
        await two.vanish()
        assert await asked(pool, only=part) == three.url
        assert await asked(pool, only=frozenset()) == three.url


async def test_each_address_of_a_name_is_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference_pool, "_LOOK_UP_EVERY_S", 0.01)
    first = Engine()
    more = [Engine(f"127.0.0.{n}", first.port) for n in (2, 3)]
    addresses: Sequence[str] = [first.address]

    async def lookup(name: str, port: int) -> Sequence[str]:
        assert (name, port) == ("servers.example", first.port)
        return addresses

    url = f"http://servers.example:{first.port}"
    async with engines(0, first, *more) as servers:
        addresses = [s.address for s in servers[:2]]
        async with InferencePool([url + "/v1"], GENEROUS_S, 100, lookup=lookup) as pool:
            assert {await asked(pool), await asked(pool)} == {s.url for s in servers[:2]}
            addresses = [s.address for s in servers[1:]]
            await wait_for_async(lambda: {p.address for p in pool.places} == {*addresses})
            answers = {await asked(pool) for _ in range(4)}
            assert answers <= {s.url for s in servers[1:]}
            addresses = []  # the name server is away
            await listed(pool, entry(servers[2]), entry(servers[1], state="behind"))
            assert {await asked(pool) for _ in range(3)} == {servers[2].url}


async def test_a_name_with_one_address_stays_a_name() -> None:
    asked_for: list[str] = []

    async def lookup(name: str, _port: int) -> Sequence[str]:
        asked_for.append(name)
        return ["10.0.0.1"]

    urls = [
        "http://one.example:9001/v1",
        "http://localhost:9001",
        "http://10.0.0.2",
        "http://[::1]",
    ]
    named = NamedServers(urls, lookup)
    await named.look_up()
    assert asked_for == ["one.example"]
    assert named.places == [Place(url) for url in urls]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Place("http://A:9001/v1"), Place("http://a:9001")),
        (Place("http://localhost/"), Place("http://127.0.0.1:80")),
        (Place("https://a"), Place("https://a:443/v1/")),
        (Place("http://a:9001", "10.0.0.1"), Place("http://10.0.0.1:9001")),
    ],
)
def test_urls_of_one_server_have_one_key(one: Place, other: Place) -> None:
    assert one.key == other.key


def test_urls_of_different_servers_have_different_keys() -> None:
    urls = ["http://a:9001", "http://a:9002", "https://a:9001", "http://b:9001", "http://a:9001/b"]
    assert len({Place(url).key for url in urls}) == len(urls)
