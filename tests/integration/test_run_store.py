"""Lost answers and concurrent calls, on a real Redis."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from grpo_api.errors import (
    BatchesByLease,
    BatchUnknown,
    GroupRefused,
    LeasesFull,
    QueueFull,
    Refused,
    StoreUnavailable,
    TrainerSuperseded,
)
from grpo_api.exact_sums import Kind
from grpo_api.limits import Limits
from grpo_api.payloads import unpack
from grpo_api.records import Acknowledged
from grpo_api.waiting_line import MAX_WAITING
from grpo_core.wire import EnvironmentRegistration
from tests.integration.run_api_calls import ENVIRONMENT
from tests.integration.run_store_rig import Run, open_run


@pytest.fixture
async def run(redis_url: str) -> AsyncIterator[Run]:
    async with open_run(redis_url, "store-tests") as run:
        yield run


@pytest.mark.parametrize("script", ["acknowledge", "open_poll", "lease"])
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


@pytest.mark.parametrize("replica", [False, True])
async def test_batch_that_was_not_sent_whole_is_sent_again(run: Run, replica: bool) -> None:
    await run.submit(1, 2, 3, 4)
    assert await run.poll(delivered=False) == [1, 2]
    assert await run.poll(replica=replica, delivered=False) == [1, 2]
    assert await run.poll(replica=replica) == [1, 2]
    assert await run.status() == (1, 2)
    assert await run.poll() == [3, 4]


async def test_late_news_of_a_delivery_do_not_count_for_the_next_trainer(run: Run) -> None:
    await run.submit(1, 2, 3, 4)
    due = await run.dispatcher.by_plain_poll(wait_s=0.0)
    assert due is not None
    await run.register()
    await run.store.batches.mark_delivered(due)
    assert await run.poll() == [1, 2]


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
        assert await run.poll(replica=True) == [1, 2]
        assert await run.poll(replica=True) is None
        await run.submit(3, 4)

    run.link.before["lease"] = another_replica_takes_them
    assert await run.poll() == [3, 4]
    assert await run.status() == (2, 0)


async def test_polls_side_by_side_are_handed_one_batch(run: Run) -> None:
    await run.submit(1, 2, 3, 4)

    async def another_replica_leases() -> None:
        assert await run.poll(replica=True) == [1, 2]

    run.link.before["lease"] = another_replica_leases
    assert await run.poll() == [1, 2]
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

    run.link.before["submit_whole"] = a_new_trainer_registers
    with pytest.raises(GroupRefused, match="exactly 6"):
        await run.submit(1, size=4)
    assert await run.status() == (0, 0)
    assert await run.payloads() == 0


@pytest.mark.parametrize(("script", "size"), [("submit_whole", 2), ("submit", 1)])
async def test_groups_that_meet_a_reset_are_refused(run: Run, script: str, size: int) -> None:
    env_id = await run.start_environment(group_size=2)
    run.link.before[script] = run.store.reset
    with pytest.raises(Refused, match="no trainer has registered"):
        await run.submit(1, size=size, env_id=env_id)
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


async def test_lease_is_the_same_however_often_it_is_asked_for(run: Run) -> None:
    await run.submit(1, 2, 3, 4)
    for replica in (False, True, False):
        assert await run.lease(after=0, replica=replica) == [1, 2]
    assert await run.status() == (1, 2)
    assert await run.lease(after=1, replica=True) == [3, 4]
    assert await run.lease(after=0) == [1, 2]
    assert await run.lease(after=2) is None
    assert await run.status() == (2, 0)


@pytest.mark.parametrize("script", ["open_poll", "lease"])
async def test_lease_whose_answer_was_lost_is_asked_for_again(run: Run, script: str) -> None:
    await run.submit(1, 2, 3, 4)
    run.link.loses_answer_of = script
    with pytest.raises(StoreUnavailable):
        await run.lease(after=0)
    assert await run.lease(after=0) == [1, 2]
    assert await run.status() == (1, 2)


async def test_leases_accumulate_until_one_acknowledges_them_all(run: Run) -> None:
    await run.submit(*range(8))
    for after in range(3):
        assert await run.lease(after) == [2 * after, 2 * after + 1]
    assert await run.acknowledge(2) == Acknowledged(batch_id=2, released=2)
    assert await run.payloads() == 4
    run.link.repeats_scripts = True
    assert await run.acknowledge(3) == Acknowledged(batch_id=3, released=0)
    assert await run.acknowledge(1) == Acknowledged(batch_id=3, released=0)
    assert await run.payloads() == 2
    assert await run.lease(after=0) == [6, 7]


async def test_trainer_that_registers_again_gets_what_it_did_not_acknowledge(run: Run) -> None:
    await run.submit(*range(8))
    for after in range(3):
        await run.lease(after)
    await run.acknowledge(1)
    former = run.trainer_id
    await run.register()
    with pytest.raises(TrainerSuperseded):
        await run.lease(after=3, trainer_id=former)
    with pytest.raises(TrainerSuperseded):
        await run.store.batches.acknowledge(former, 2)
    assert [await run.lease(after) for after in (0, 2, 3)] == [[2, 3], [4, 5], [6, 7]]
    assert await run.status() == (4, 0)


async def test_trainer_whose_last_acknowledgement_was_lost_goes_on_behind_it(run: Run) -> None:
    await run.submit(*range(4))
    await run.lease(after=0)
    await run.register()
    assert await run.lease(after=1) == [2, 3]
    assert await run.acknowledge(2) == Acknowledged(batch_id=2, released=2)


async def test_batches_that_never_were_are_refused(run: Run) -> None:
    await run.submit(1, 2)
    await run.lease(after=0)
    with pytest.raises(BatchUnknown, match="no batch 2 "):
        await run.lease(after=2)
    with pytest.raises(BatchUnknown, match="the last one is 1"):
        await run.acknowledge(2)


async def test_plain_poll_takes_nothing_from_a_trainer_with_leases(run: Run) -> None:
    await run.submit(*range(4))
    await run.lease(after=0)
    with pytest.raises(BatchesByLease):
        await run.poll()
    assert await run.lease(after=0) == [0, 1]
    await run.register()
    assert await run.poll() == [0, 1]


async def test_leases_that_hold_too_much_have_to_be_acknowledged_first(redis_url: str) -> None:
    limits = Limits(queued_groups=1000, queued_bytes=2**30, leased_bytes=1)
    async with open_run(redis_url, "lease-limit", limits) as run:
        await run.submit(*range(4))
        assert await run.lease(after=0) == [0, 1]
        with pytest.raises(LeasesFull):
            await run.lease(after=1)
        assert await run.lease(after=0) == [0, 1]
        await run.acknowledge(1)
        assert await run.lease(after=1) == [2, 3]


async def test_long_poll_answers_as_soon_as_a_batch_is_there(run: Run) -> None:
    polling = asyncio.create_task(run.lease(after=0, wait_s=30.0))
    await asyncio.sleep(0.2)
    assert not polling.done()
    await run.submit(1, 2, replica=True)
    assert await asyncio.wait_for(polling, timeout=5.0) == [1, 2]
    assert await run.lease(after=1, wait_s=0.1) is None


async def test_long_poll_ends_when_the_server_stops(run: Run) -> None:
    polling = asyncio.create_task(run.lease(after=0, wait_s=30.0))
    await asyncio.sleep(0.1)
    run.lifetime.closing.set()
    assert await asyncio.wait_for(polling, timeout=5.0) is None


@pytest.mark.parametrize("size", [2, 1], ids=["whole", "part"])
async def test_submission_under_the_same_key_is_queued_once(run: Run, size: int) -> None:
    env_id = await run.start_environment(group_size=2)
    answers = [
        await run.submit(7, size=size, env_id=env_id, key="k", replica=replica)
        for replica in (False, True, True)
    ]
    assert answers == [[[None]]] * 3 if size == 2 else answers == [[[1]]] * 3
    assert await run.payloads() == 1
    with pytest.raises(Refused, match="was used for other groups"):
        await run.submit(8, size=size, env_id=env_id, key="k")
    await run.submit(7, size=size, env_id=env_id, key="another")
    assert await run.payloads() == 2


async def test_submissions_under_one_key_side_by_side_are_queued_once(run: Run) -> None:
    await asyncio.gather(*(run.submit(7, key="k", replica=bool(i % 2)) for i in range(16)))
    assert await run.status() == (0, 1)


async def test_run_of_the_former_layout_is_left_alone(run: Run) -> None:
    former = f"{run.link.former_prefix}trainer"
    await run.link.call("HSET", former, "batch_size", "4")
    with pytest.raises(Refused, match="stored by a former version"):
        await run.register()
    assert await run.link.call("HGET", former, "batch_size") == b"4"
    await run.store.reset()
    await run.register()


async def test_ids_that_nobody_registered_are_one_sender(run: Run) -> None:
    for marker in range(6):
        await run.submit(marker, size=2 if marker < 4 else 1, env_id=100 + marker)
    view = await run.store.environments.view()
    assert dict(view.counters.queued) == {Kind(None, 2): 4, Kind(None, 1): 2}


async def test_environment_that_registers_over_a_reset_is_one_of_the_new_run(run: Run) -> None:
    await run.poll()

    async def the_run_is_reset() -> None:
        run.link.repeats_scripts = False
        await run.store.reset()
        await run.register()
        await run.poll()

    run.link.repeats_scripts = True
    run.link.between_repeats = the_run_is_reset
    registered = await run.store.environments.register(
        EnvironmentRegistration.model_validate(ENVIRONMENT)
    )
    assert registered is not None
    view = await run.store.environments.view()
    assert [environment.env_id for environment in view.environments] == [registered.env_id]


async def test_batch_that_is_being_sent_over_a_reset_is_not_completed_by_the_next_run(
    run: Run,
) -> None:
    await run.submit(1, 2)
    due = await run.dispatcher.by_lease(run.trainer_id, 0, 0.0)
    assert due is not None
    await run.store.reset()
    await run.register()
    await run.submit(3, 4)
    assert [found async for found in run.store.payloads.load(due.lease.group_ids)] == [None, None]


async def test_totals_are_those_of_what_is_stored(run: Run) -> None:
    env_id = await run.start_environment(group_size=2)
    await run.submit(1, 2, 3)
    await run.submit(4, 5, 6, size=1, env_id=env_id)
    await run.lease(after=0)
    facts = await run.store.facts.read()
    stored = await run.stored_bytes()
    assert (facts.queued_groups, facts.queued_sequences) == (3, 4)
    assert (facts.buffered_parts, facts.leased_batches) == (1, 1)
    assert facts.queued_bytes + facts.buffered_bytes + facts.leased_bytes == stored
    await run.acknowledge(1)
    await run.lease(after=1)
    await run.acknowledge(2)
    await run.store.environments.disconnect(env_id)
    facts = await run.store.facts.read()
    assert (facts.queued_bytes, facts.buffered_bytes, facts.leased_bytes) == (0, 0, 0)
    assert (facts.queued_groups, facts.queued_sequences, facts.buffered_parts) == (0, 0, 0)


LARGE = {"images": random.Random(0).randbytes(1_500_000).hex()}
"""More than a megabyte as stored: such a group is stored piece by piece ahead of being queued."""


@pytest.mark.parametrize("size", [2, 1], ids=["whole", "parts"])
async def test_large_groups_are_served_and_let_go_of_like_others(run: Run, size: int) -> None:
    run.link.repeats_scripts = True
    env_id = await run.start_environment(group_size=2)
    await run.submit(1, 2, 3, 4, size=size, env_id=env_id, **LARGE)
    assert (await run.payloads(), len(await run.staged())) == (0, 4)
    assert await run.lease(after=0) == ([1, 2] if size == 2 else [1, 2, 3, 4])
    await run.submit(5, size=2)
    await run.acknowledge(1)
    assert len(await run.staged()) == (2 if size == 2 else 0)


async def test_large_latest_example_outlives_its_batch_until_the_next(run: Run) -> None:
    await run.submit(1, 2, **LARGE)
    await run.lease(after=0)
    await run.acknowledge(1)
    latest = await run.store.payloads.latest()
    assert latest is not None
    assert LARGE["images"].encode() in unpack(latest)
    await run.submit(3)
    assert await run.staged() == []


async def test_large_parts_go_with_their_environment_and_with_the_run(run: Run) -> None:
    env_id = await run.start_environment(group_size=2)
    await run.submit(1, size=1, env_id=env_id, **LARGE)
    await run.store.environments.disconnect(env_id)
    assert await run.staged() == []
    await run.submit(2, **LARGE)
    await run.store.reset()
    assert await run.staged() == []


async def test_large_submission_under_one_key_leaves_nothing_for_ever(run: Run) -> None:
    for _ in range(2):
        await run.submit(1, key="k", **LARGE)
    assert await run.status() == (0, 1)
    assert [await run.link.call("TTL", key) for key in await run.staged()] == [-1]


async def test_large_group_that_is_refused_leaves_nothing(redis_url: str) -> None:
    limits = Limits(queued_groups=2, queued_bytes=2**30, leased_bytes=2**30)
    async with open_run(redis_url, "large-refused", limits) as run:
        with pytest.raises(GroupRefused):
            await run.submit(1, size=8, **LARGE)
        await run.submit(2, 3)
        with pytest.raises(QueueFull):
            await run.submit(4, **LARGE)
        await run.store.reset()
        with pytest.raises(Refused, match="no trainer has registered"):
            await run.submit(5, **LARGE)
        assert await run.staged() == []


async def test_large_group_that_lost_its_beginning_is_not_taken(run: Run) -> None:
    async def its_beginning_is_lost() -> None:
        run.link.before["stage_piece"] = it_is_lost

    async def it_is_lost() -> None:
        await run.link.call("DEL", *await run.staged())

    run.link.before["stage_piece"] = its_beginning_is_lost
    with pytest.raises(StoreUnavailable, match="send them again"):
        await run.submit(1, **LARGE)
    assert (await run.status(), await run.staged()) == ((0, 0), [])


async def test_large_group_that_goes_while_it_is_read_is_gone(run: Run) -> None:
    await run.submit(1, **LARGE)
    await run.submit(2)
    due = await run.dispatcher.by_lease(run.trainer_id, 0, 0.0)
    assert due is not None

    async def it_is_acknowledged() -> None:
        await run.acknowledge(1)

    run.link.before["GETRANGE"] = it_is_acknowledged
    assert await anext(run.store.payloads.load(due.lease.group_ids)) is None


async def test_queue_limit_holds_where_no_batch_can_be_formed(redis_url: str) -> None:
    limits = Limits(queued_groups=4, queued_bytes=2**30, leased_bytes=2**30)
    async with open_run(redis_url, "no-batch", limits) as run:
        await run.register(batch_size=12)
        eights = await run.start_environment(group_size=8)
        await run.start_environment(group_size=4)
        with pytest.raises(QueueFull):
            await run.submit(*range(100), size=8, env_id=eights)
        assert await run.status() == (0, limits.queued_groups)


async def test_whom_the_batch_waits_for_is_let_in_past_a_full_line(redis_url: str) -> None:
    limits = Limits(queued_groups=4, queued_bytes=2**30, leased_bytes=2**30)
    async with open_run(redis_url, "full-line", limits) as run:
        first = await run.start_environment(group_size=2)
        second = await run.start_environment(group_size=2, min_batch_allocation=0.5)
        await run.submit(*range(4), env_id=first)
        waiting = [
            asyncio.create_task(run.submit(i, env_id=first)) for i in range(10, 10 + MAX_WAITING)
        ]
        await asyncio.sleep(0.1)
        with pytest.raises(QueueFull):
            await run.submit(8, env_id=first)
        await run.submit(9, env_id=second)
        assert await run.lease(after=0) == [0, 9]
        await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.parametrize(("script", "size"), [("submit_whole", 2), ("submit", 1)])
async def test_large_group_that_was_forgotten_before_it_was_queued_is_sent_again(
    run: Run, script: str, size: int
) -> None:
    env_id = await run.start_environment(group_size=2)

    async def it_is_forgotten() -> None:
        await run.link.call("DEL", *await run.staged())

    run.link.before[script] = it_is_forgotten
    with pytest.raises(StoreUnavailable, match="send them again"):
        await run.submit(1, size=size, env_id=env_id, **LARGE)
    assert await run.status() == (0, 0)
    await run.submit(1, size=size, env_id=env_id, **LARGE)
