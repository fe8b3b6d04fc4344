"""Large groups, which are staged in pieces, and limits of the queue, on a real Redis."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from grpo_api.errors import GroupRefused, QueueFull, Refused, StoreUnavailable
from grpo_api.intake import MAX_WAITING, Intake
from tests.integration.run_store_rig import LARGE, LIMITS, Run, open_run
from tests.integration.test_run_api_openapi import DEADLINE_S
from tests.support.wait import wait_for_async

FOUR_GROUPS = replace(LIMITS, queued_groups=4)


@pytest.mark.parametrize("size", [2, 1], ids=["whole", "parts"])
async def test_large_groups_are_served_and_released_like_others(run: Run, size: int) -> None:
    run.link.repeats_scripts = True
    env_id = await run.start_environment(group_size=2)
    await run.submit(1, 2, 3, 4, size=size, env_id=env_id, **LARGE)
    assert (await run.payloads(), len(await run.staged())) == (0, 4)
    assert await run.lease(after=0) == ([1, 2] if size == 2 else [1, 2, 3, 4])
    await run.submit(5, size=2)
    await run.acknowledge(1)
    assert len(await run.staged()) == (2 if size == 2 else 0)


async def test_large_parts_go_with_their_environment_and_with_the_run(run: Run) -> None:
    env_id = await run.start_environment(group_size=2)
    await run.submit(1, size=1, env_id=env_id, **LARGE)
    await run.store.disconnect(env_id)
    assert await run.staged() == []
    await run.submit(2, **LARGE)
    await run.store.reset()
    assert await run.staged() == []


async def test_a_repeated_large_submission_is_stored_once(run: Run) -> None:
    for _ in range(2):
        await run.submit(1, key="k", **LARGE)
    assert await run.status() == (0, 1)
    assert [await run.link.call("TTL", key) for key in await run.staged()] == [-1]


async def test_a_large_group_that_is_refused_leaves_nothing(redis_url: str) -> None:
    async with open_run(redis_url, "large-refused", replace(LIMITS, queued_groups=2)) as run:
        with pytest.raises(GroupRefused):
            await run.submit(1, size=8, **LARGE)
        await run.submit(2, 3)
        with pytest.raises(QueueFull):
            await run.submit(4, **LARGE)
        await run.store.reset()
        with pytest.raises(Refused, match="no trainer has registered"):
            await run.submit(5, **LARGE)
        assert await run.staged() == []


async def test_the_queue_limit_holds_if_no_batch_can_be_formed(redis_url: str) -> None:
    async with open_run(redis_url, "no-batch", FOUR_GROUPS) as run:
        await run.register(batch_size=12)
        sender = await run.start_environment(group_size=4)
        await run.start_environment(group_size=4, min_batch_allocation=0.5)
        with pytest.raises(QueueFull):
            await run.submit(*range(100), size=4, env_id=sender)
        assert await run.status() == (0, FOUR_GROUPS.queued_groups)


async def test_an_environment_that_the_batch_waits_for_passes_a_full_line(redis_url: str) -> None:
    async with open_run(redis_url, "full-line", FOUR_GROUPS, full_s=DEADLINE_S) as run:
        first = await run.start_environment(group_size=2)
        second = await run.start_environment(group_size=2, min_batch_allocation=0.5)
        await run.submit(*range(4), env_id=first)
        held = [asyncio.create_task(run.submit(10, env_id=first)) for _ in range(MAX_WAITING)]
        await wait_for_async(run.waiting, lambda waiting: waiting == MAX_WAITING)
        with pytest.raises(QueueFull):
            await run.submit(8, env_id=first)
        await run.submit(9, env_id=second)
        assert await run.lease(after=0) == [0, 9]
        left = {*held}
        while left:  # `asyncio.wait_for` of Python 3.11, with which redis-py sends, may swallow one
            for submission in left:
                submission.cancel()
            _, left = await asyncio.wait(left, timeout=0.1)


async def test_groups_that_waited_longest_come_first(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: Counter[asyncio.Event] = Counter()
    wait = Intake._wait

    async def counted_wait(intake: Intake, called: asyncio.Event) -> None:
        await wait(intake, called)
        looks[called] += 1

    monkeypatch.setattr(Intake, "_wait", counted_wait)
    async with open_run(redis_url, "line", FOUR_GROUPS, full_s=DEADLINE_S) as run:
        await run.submit(*range(4))
        held = [await run.submit_to_the_line(marker) for marker in (10, 11)]
        second = run.intake._line[1]

        async def room_is_made_and_the_second_looks_before_the_first_is_back() -> None:
            assert await run.poll() == [0, 1]
            before = looks[second]
            await wait_for_async(lambda: looks[second], lambda count: count > before + 1)

        run.link.before["submit_whole"] = room_is_made_and_the_second_looks_before_the_first_is_back
        await asyncio.gather(*held)
        assert [await run.poll(), await run.poll()] == [[2, 3], [10, 11]]


@pytest.mark.parametrize(("script", "size"), [("submit_whole", 2), ("submit_placed", 1)])
async def test_a_large_group_that_redis_forgot_is_not_taken(
    run: Run, script: str, size: int
) -> None:
    env_id = await run.start_environment(group_size=2)

    async def it_is_forgotten() -> None:
        await run.link.call("DEL", *await run.staged())

    run.link.before[script] = it_is_forgotten
    with pytest.raises(StoreUnavailable, match="send the groups again"):
        await run.submit(1, size=size, env_id=env_id, **LARGE)
    assert await run.status() == (0, 0)
    await run.submit(1, size=size, env_id=env_id, **LARGE)


async def test_a_submission_that_waits_for_room_and_its_repeat_are_queued_once(
    redis_url: str,
) -> None:
    async with open_run(redis_url, "held-twice", FOUR_GROUPS, full_s=DEADLINE_S) as run:
        await run.submit(*range(4))
        held = [asyncio.create_task(run.submit(9, key="k")) for _ in range(2)]
        await wait_for_async(run.waiting, lambda waiting: waiting == 2)
        assert await run.poll() == [0, 1]
        assert await asyncio.gather(*held) == [[[None]]] * 2
        assert await run.status() == (1, 3)


@pytest.mark.parametrize("sent", [{}, LARGE], ids=["small", "large"])
async def test_a_repeat_gets_its_answer_whether_the_queue_is_full_or_others_wait(
    redis_url: str, sent: dict[str, str]
) -> None:
    async with open_run(redis_url, "full-repeat", FOUR_GROUPS, full_s=DEADLINE_S) as run:
        await run.submit(0, key="k", **sent)
        await run.submit(1, 2, 3)
        assert await run.submit(0, key="k", **sent) == [[None]]
        waiting = await run.submit_to_the_line(9)
        assert await run.submit(0, key="k", **sent) == [[None]]
        waiting.cancel()
        assert await run.status() == (0, 4)
