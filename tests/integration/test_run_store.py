"""Lost answers and concurrent calls, on a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from grpo_api.errors import GroupRefused, Refused, StoreUnavailable
from tests.integration.run_store_rig import Run, group_ids, open_run


@pytest.fixture
async def run(redis_url: str) -> AsyncIterator[Run]:
    async with open_run(redis_url, "store-tests") as run:
        yield run


@pytest.mark.parametrize("script", ["open_poll", "lease"])
async def test_batch_whose_answer_was_lost_is_not_acknowledged(run: Run, script: str) -> None:
    await run.submit(1, 2, 3, 4)
    run.link.loses_answer_of = script
    with pytest.raises(StoreUnavailable):
        await run.poll()
    assert await run.poll() == [1, 2]
    assert await run.status() == (1, 2)
    assert await run.poll() == [3, 4]


async def test_batch_lost_on_its_second_delivery_comes_a_third_time(run: Run) -> None:
    await run.submit(1, 2)
    assert await run.poll() == [1, 2]
    await run.register()
    run.link.loses_answer_of = "open_poll"
    with pytest.raises(StoreUnavailable):
        await run.poll()
    assert await run.poll() == [1, 2]
    assert await run.poll() is None


async def test_repeated_calls_happen_once(run: Run) -> None:
    run.link.repeats_scripts = True
    await run.submit(1, 2, 3)
    assert await run.status() == (0, 3)
    assert await run.poll() == [1, 2]
    assert await run.status() == (1, 1)
    assert await run.start_environment() == 0
    assert len((await run.store.environments.view()).environments) == 1
    await run.submit(4, 5, size=1, env_id=0)
    assert await run.status() == (1, 3)
    assert await run.poll() == [3, 4, 5]


async def test_plan_whose_groups_were_taken_is_made_again(run: Run) -> None:
    await run.submit(1, 2)

    async def another_replica_takes_them() -> None:
        assert group_ids(await run.replica.next_batch()) == [1, 2]
        assert await run.replica.next_batch() is None
        await run.submit(3, 4)

    run.link.before["lease"] = another_replica_takes_them
    assert await run.poll() == [3, 4]
    assert await run.status() == (2, 0)


async def test_poll_that_lost_the_race_takes_nothing(run: Run) -> None:
    await run.submit(1, 2, 3, 4)

    async def another_replica_leases() -> None:
        assert group_ids(await run.replica.next_batch()) == [1, 2]

    run.link.before["lease"] = another_replica_leases
    assert await run.poll() is None
    assert await run.status() == (1, 2)


@pytest.mark.parametrize("reset", [False, True])
async def test_poll_of_a_trainer_that_is_gone_takes_nothing(run: Run, reset: bool) -> None:
    await run.submit(1, 2)

    async def a_new_trainer_registers() -> None:
        if reset:
            await run.store.reset()
        await run.register()
        await run.submit(3, 4)

    run.link.before["lease"] = a_new_trainer_registers
    assert await run.poll() is None
    assert await run.poll() == ([3, 4] if reset else [1, 2])


async def test_groups_that_meet_a_new_trainer_are_placed_for_that_one(run: Run) -> None:
    async def a_new_trainer_registers() -> None:
        await run.register(batch_size=6)

    run.link.before["submit"] = a_new_trainer_registers
    with pytest.raises(GroupRefused, match="exactly 6"):
        await run.submit(1, size=4)
    assert await run.status() == (0, 0)
    assert await run.payloads() == 0


async def test_groups_that_meet_a_reset_are_refused(run: Run) -> None:
    run.link.before["submit"] = run.store.reset
    with pytest.raises(Refused, match="no trainer has registered"):
        await run.submit(1)
    assert await run.payloads() == 0


async def test_part_that_another_replica_completed_meanwhile_waits_for_the_next(run: Run) -> None:
    env_id = await run.start_environment()
    await run.submit(1, size=1, env_id=env_id)

    async def another_replica_completes_the_group() -> None:
        await run.submit(2, size=1, env_id=env_id, replica=True)

    run.link.before["submit"] = another_replica_completes_the_group
    await run.submit(3, size=1, env_id=env_id)
    assert await run.status() == (0, 2)
    await run.submit(4, size=1, env_id=env_id)
    assert await run.poll() == [1, 2, 3, 4]


async def test_parts_sent_side_by_side_are_all_placed(run: Run) -> None:
    env_id = await run.start_environment()
    parts = range(64)
    await asyncio.gather(
        *(run.submit(i, size=1, env_id=env_id, replica=bool(i % 2)) for i in parts)
    )
    assert await run.status() == (0, len(parts))
    served: list[int] = []
    while batch := await run.poll():
        served += batch
    assert sorted(served) == list(parts)


async def test_batch_size_is_not_changed_under_groups_that_came_meanwhile(run: Run) -> None:
    await run.submit(1, size=1)

    async def found_to_suit() -> None:
        run.link.before["register"] = another_size_arrives

    async def another_size_arrives() -> None:
        await run.submit(2, size=4)

    run.link.before["register"] = found_to_suit
    with pytest.raises(Refused, match="groups of 4 sequences are queued"):
        await run.register(batch_size=6)
    await run.register(batch_size=8)
