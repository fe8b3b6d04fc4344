"""Leases and long polls, on a real Redis."""

from __future__ import annotations

import pytest

from grpo_api.errors import Conflict, StoreUnavailable
from tests.integration.run_store_rig import Interruption, Run, open_run

FOR_EVER_S = 3600.0
"""Long enough that a poll which reaches this deadline has failed."""


async def test_a_lease_is_the_same_however_often_it_is_asked_for(run: Run) -> None:
    await run.submit(1, 2, 3, 4)
    for replica in (False, True, False):
        assert await run.lease(after=0, replica=replica) == [1, 2]
    assert await run.status() == (1, 2)
    assert await run.lease(after=1, replica=True) == [3, 4]
    assert await run.lease(after=0) == [1, 2]
    assert await run.lease(after=2) is None
    assert await run.status() == (2, 0)


@pytest.mark.parametrize("script", ["open_poll", "lease_batch"])
async def test_a_lease_whose_answer_was_lost_is_asked_for_again(run: Run, script: str) -> None:
    await run.submit(1, 2, 3, 4)
    run.link.loses_answer_of = script
    with pytest.raises(StoreUnavailable):
        await run.lease(after=0)
    assert await run.lease(after=0) == [1, 2]
    assert await run.status() == (1, 2)


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


async def long_poll(run: Run, interruption: Interruption) -> list[int] | None:
    """Poll without a batch; `interruption` happens before the second check of the queue."""

    async def it_waits() -> None:
        run.link.before["GET"] = interruption

    run.link.before["batch_candidates"] = it_waits
    return await run.lease(after=0, wait_s=FOR_EVER_S)


async def test_a_long_poll_answers_once_a_batch_is_there(run: Run) -> None:
    async def a_batch_arrives() -> None:
        await run.submit(1, 2, replica=True)

    assert await long_poll(run, a_batch_arrives) == [1, 2]


async def test_a_long_poll_ends_when_the_server_stops_or_its_time_is_over(run: Run) -> None:
    async def the_server_stops() -> None:
        run.lifetime.closing.set()

    assert await run.lease(after=0, wait_s=0.1) is None
    assert await long_poll(run, the_server_stops) is None
