"""Queue, leases and long polls with lost answers and concurrent calls, on a real Redis."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from grpo_api.errors import BatchGone, Conflict, GroupRefused, Refused, StoreUnavailable
from tests.integration.run_store_rig import Run, open_run

FOR_EVER_S = 3600.0
"""Long enough that a poll which reaches this deadline has failed."""


@pytest.mark.parametrize("script", ["acknowledge", "open_poll", "lease_batch"])
async def test_a_batch_whose_answer_was_lost_is_handed_out_again(run: Run, script: str) -> None:
    await run.submit(*range(1, 7))
    run.link.loses_answer_of = script
    with pytest.raises(StoreUnavailable):
        await run.poll()
    assert await run.poll() == [1, 2]
    assert await run.status() == (1, 4)
    assert await run.poll() == [3, 4]
    if script != "acknowledge":
        await run.register()
        run.link.loses_answer_of = script
        with pytest.raises(StoreUnavailable):
            await run.lease(after=2)
        assert await run.lease(after=2) == [5, 6]
        assert await run.status() == (3, 0)


async def test_repeated_calls_happen_once(run: Run) -> None:
    run.link.repeats_scripts = True
    await run.submit(1, 2, 3)
    assert await run.status() == (0, 3)
    assert await run.poll() == [1, 2]
    assert await run.status() == (1, 1)
    assert await run.start_environment() == 0
    assert len((await run.store.view()).environments) == 1
    await run.submit(4, 5, size=1, env_id=0)
    assert await run.status() == (1, 3)
    assert await run.poll() == [3, 4, 5]


@pytest.mark.parametrize("script", ["batch_candidates", "lease_batch"])
async def test_polls_side_by_side_are_handed_different_batches(run: Run, script: str) -> None:
    await run.submit(1, 2, 3, 4, 5, 6)

    async def another_replica_leases() -> None:
        assert await run.poll(replica=True) == [1, 2]

    run.link.before[script] = another_replica_leases
    async with run.answer() as second, run.answer(replica=True) as third:
        assert await run.markers(second) == [3, 4]
        assert await run.markers(third) == [5, 6]
        assert await run.poll() is None
        assert third is not None
        await run.store.leases.mark_delivered(third)
    assert await run.poll(delivered=False) == [3, 4]
    assert await run.payloads() == 3  # two, and the latest example
    await run.register()
    assert [await run.poll() for _ in range(2)] == [[3, 4], None]
    assert await run.status() == (3, 0)


@pytest.mark.parametrize("loss", ["connection", "trainer"])
async def test_an_answer_whose_batch_is_handed_out_again_meanwhile_is_not_sent_whole(
    run: Run, loss: str
) -> None:
    await run.submit(1, 2)
    async with run.answer() as due:
        if loss == "connection":
            await run.link.call("CLIENT", "KILL", "TYPE", "pubsub")
        else:
            await run.register()
        assert await run.poll(replica=True) == [1, 2]
        assert due is not None
        with pytest.raises(BatchGone):
            await run.store.leases.mark_delivered(due)


@pytest.mark.parametrize("reset", [False, True])
async def test_a_poll_of_the_previous_trainer_takes_nothing(run: Run, reset: bool) -> None:
    await run.submit(1, 2)

    async def a_new_trainer_registers() -> None:
        if reset:
            await run.store.reset()
        await run.register()
        await run.submit(3, 4)

    run.link.before["lease_batch"] = a_new_trainer_registers
    assert await run.poll() is None
    assert await run.poll() == ([3, 4] if reset else [1, 2])


async def test_a_part_whose_group_another_replica_completed_waits_for_the_next(run: Run) -> None:
    env_id = await run.start_environment()
    await run.submit(1, size=1, env_id=env_id)

    async def another_replica_completes_the_group() -> None:
        await run.submit(2, size=1, env_id=env_id, replica=True)

    run.link.before["submit_placed"] = another_replica_completes_the_group
    await run.submit(3, size=1, env_id=env_id)
    assert await run.status() == (0, 2)
    await run.submit(4, size=1, env_id=env_id)
    assert await run.poll() == [1, 2, 3, 4]


async def test_submissions_under_one_key_side_by_side_are_queued_once(run: Run) -> None:
    env_id = await run.start_environment(group_size=2)
    for size, answer in ((2, None), (1, 1)):
        submission = partial(run.submit, 7, size=size, env_id=env_id, key=f"{size}")
        repeats = [submission(replica=bool(i % 2)) for i in range(16)]
        assert await asyncio.gather(*repeats) == [[[answer]]] * 16
    assert await run.status() == (0, 1)
    assert await run.payloads() == 2


async def test_groups_that_meet_a_new_trainer_are_placed_for_that_one(run: Run) -> None:
    async def a_new_trainer_registers() -> None:
        await run.register(batch_size=6)

    run.link.before["submit_whole"] = a_new_trainer_registers
    with pytest.raises(GroupRefused, match="exactly 6"):
        await run.submit(1, size=4)
    assert (await run.status(), await run.payloads()) == ((0, 0), 0)


@pytest.mark.parametrize(("script", "size"), [("submit_whole", 2), ("submit_placed", 1)])
async def test_groups_that_meet_a_reset_are_refused(run: Run, script: str, size: int) -> None:
    env_id = await run.start_environment(group_size=2)
    run.link.before[script] = run.store.reset
    with pytest.raises(Refused, match="no trainer has registered"):
        await run.submit(1, size=size, env_id=env_id)
    assert await run.payloads() == 0


async def test_nothing_is_left_of_acknowledged_groups(run: Run) -> None:
    env_id = await run.start_environment()
    for marker in range(0, 20, 2):
        await run.submit(marker)
        await run.submit(marker + 1, marker + 1, size=1, env_id=env_id)
        assert await run.poll() == [marker, marker + 1, marker + 1]
    assert await run.poll() is None
    assert await run.payloads() == 1  # the latest example
    view = await run.store.view()
    assert (view.queued, view.max_group_size) == ({}, 1)
    assert await run.link.call("EXISTS", f"{run.link.prefix}buffers") == 0


async def test_reset_leaves_no_key_but_short_lived_receipts(run: Run) -> None:
    env_id = await run.start_environment()
    await run.submit(1, size=1, env_id=env_id)
    await run.submit(2, 3, 4)
    assert await run.poll() is not None
    await run.store.reset()
    keys = await run.link.call("KEYS", f"{run.link.prefix}*")
    receipts = [key for key in keys if b"receipt:" in key]
    outlive = {
        f"{run.link.prefix}{name}".encode()
        for name in ("resets", "last_group_id", "last_env_id", "start")
    }
    assert set(keys) - set(receipts) == outlive
    assert all([await run.link.call("TTL", key) > 0 for key in receipts])


async def test_a_lease_is_the_same_however_often_it_is_asked_for(run: Run) -> None:
    await run.submit(1, 2, 3, 4)
    for replica in (False, True, False):
        assert await run.lease(after=0, replica=replica) == [1, 2]
    assert await run.status() == (1, 2)
    assert await run.lease(after=1, replica=True) == [3, 4]
    assert await run.lease(after=0) == [1, 2]
    assert await run.lease(after=2) is None
    assert await run.status() == (2, 0)


async def test_one_acknowledgement_releases_all_leases_up_to_it_once(run: Run) -> None:
    await run.submit(*range(8))
    for after in range(3):
        assert await run.lease(after) == [2 * after, 2 * after + 1]
    assert await run.acknowledge(2) == (2, 2)
    assert await run.payloads() == 4
    run.link.repeats_scripts = True
    assert await run.acknowledge(3) == (3, 0)
    assert await run.acknowledge(1) == (3, 0)
    assert await run.payloads() == 2
    assert await run.lease(after=0) == [6, 7]


async def test_a_plain_poll_takes_nothing_from_a_trainer_with_leases(run: Run) -> None:
    await run.submit(*range(4))
    await run.lease(after=0)
    with pytest.raises(Conflict, match="a trainer leases the batches"):
        await run.poll()
    assert await run.lease(after=0) == [0, 1]
    await run.register()
    assert await run.poll() == [0, 1]


async def test_leases_that_hold_too_much_have_to_be_acknowledged_first(redis_url: str) -> None:
    async with open_run(redis_url, "lease-limit", max_leased_bytes=1) as run:
        await run.submit(*range(4))
        assert await run.lease(after=0) == [0, 1]
        with pytest.raises(Conflict, match="unacknowledged batches hold"):
            await run.lease(after=1)
        assert await run.lease(after=0) == [0, 1]
        await run.acknowledge(1)
        assert await run.lease(after=1) == [2, 3]


async def test_a_long_poll_ends_when_the_server_stops_or_its_time_is_over(run: Run) -> None:
    assert await run.lease(after=0, wait_s=0.1) is None

    async def the_server_stops() -> None:
        run.closing.set()

    async def it_waits() -> None:  # before the second check of the queue
        run.link.before["GET"] = the_server_stops

    run.link.before["batch_candidates"] = it_waits
    assert await run.lease(after=0, wait_s=FOR_EVER_S) is None
