"""Waits end with the server, and leave a mark on the request that they held."""

from __future__ import annotations

import asyncio

from grpo_api.lifetime import Lifetime, begin_request

DEADLINE_S = 60.0


async def test_a_wait_lasts_as_long_as_was_asked_where_the_server_goes_on() -> None:
    assert not await Lifetime().closes_within(0.01)


async def test_a_wait_ends_the_moment_the_server_is_told_to_stop() -> None:
    lifetime = Lifetime()
    held = [asyncio.create_task(lifetime.closes_within(3600.0)) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in held)
    lifetime.closing.set()
    async with asyncio.timeout(DEADLINE_S):
        assert await asyncio.gather(*held) == [True, True, True]
        assert await lifetime.closes_within(3600.0)


async def test_only_the_request_that_waited_is_marked() -> None:
    lifetime = Lifetime()

    async def request(wait_s: float | None) -> bool:
        marks = begin_request()
        if wait_s is not None:
            await lifetime.closes_within(wait_s)
        return marks.was_held

    assert [*await asyncio.gather(request(0.01), request(None))] == [True, False]


async def test_outside_of_requests_there_is_nothing_to_mark() -> None:
    assert not await asyncio.create_task(Lifetime().closes_within(0.0))
