"""Waits end with the server, and leave a mark on the request that they held."""

from __future__ import annotations

import asyncio

from grpo_api.lifetime import Lifetime, begin_request


async def test_a_wait_ends_after_its_time_or_the_moment_the_server_is_told_to_stop() -> None:
    lifetime = Lifetime()
    assert not await lifetime.closes_within(0.01)
    held = [asyncio.create_task(lifetime.closes_within(3600.0)) for _ in range(3)]
    await asyncio.sleep(0)
    lifetime.closing.set()
    assert await asyncio.gather(*held) == [True, True, True]
    assert await lifetime.closes_within(3600.0)


async def test_only_the_request_that_waited_is_marked() -> None:
    lifetime = Lifetime()

    async def request(wait_s: float | None) -> bool:
        marks = begin_request()
        if wait_s is not None:
            await lifetime.closes_within(wait_s)
        return marks.was_held

    assert [*await asyncio.gather(request(0.0), request(None))] == [True, False]
    assert not await lifetime.closes_within(0.0)  # outside of requests there is nothing to mark
