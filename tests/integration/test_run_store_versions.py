"""Groups carry the version that the inference server wrote to Redis when they arrived."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from grpo_api.batches import next_batch
from grpo_api.store.leases import Lease, Poll
from grpo_core.weights.ref import WeightKind, WeightRef
from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.weights.served_store import RedisServedStore, ServedWeights
from tests.integration.run_store_rig import LARGE, LIMITS, Run, open_run
from tests.support.wait import DEADLINE_S

RUN_ID = "version-tests"
OLD, NEW, NEWEST = PolicyVersion(1, 9), PolicyVersion(2, 10), PolicyVersion(2, 11)


async def serve(record: RedisServedStore, version: PolicyVersion) -> None:
    await record.save(ServedWeights(WeightRef(version=version, kind=WeightKind.MEMORY)))


async def leased(run: Run, after: int) -> Lease:
    lease = await next_batch(run.store, run.closing, Poll(run.trainer_id, after), 0.0)
    assert lease is not None
    return lease


async def received_under(run: Run, after: int) -> list[tuple[int, PolicyVersion | None]]:
    """The marker and the version of each group in the batch after `after`."""
    lease = await leased(run, after)
    markers = await run.markers(lease)
    assert markers is not None
    return list(zip(markers, (group.received_under for group in lease.groups), strict=True))


@pytest.fixture
async def run(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Run]:
    # with the usual deadline, the record would reach Redis late on a slow machine
    monkeypatch.setattr("grpo_vllm.weights.served_store.ATTEMPT_DEADLINE_S", DEADLINE_S)
    limits = replace(LIMITS, queued_groups=4)
    async with open_run(redis_url, RUN_ID, limits, full_s=DEADLINE_S) as run:
        keys = run.link.served_weights, run.link.followed_server
        await run.link.call("DEL", *keys)
        yield run
        await run.link.call("DEL", *keys)


@pytest.fixture
async def own(run: Run, redis_url: str) -> AsyncIterator[RedisServedStore]:  # noqa: ARG001
    """The record of the run's own server."""
    async with RedisServedStore(redis_url, RUN_ID) as record:
        yield record


async def test_groups_carry_the_version_served_when_they_arrived(
    run: Run, own: RedisServedStore
) -> None:
    await run.submit(1)
    await serve(own, OLD)
    for _ in range(2):  # the run's own server stays
        await run.register(server_run_id=RUN_ID)
    await run.submit(2, 3)
    await serve(own, NEW)
    await run.submit(4, **LARGE)
    assert await received_under(run, after=0) == [(1, None), (2, OLD)]
    assert await received_under(run, after=1) == [(3, OLD), (4, NEW)]


async def test_groups_follow_the_server_that_the_trainer_names(
    run: Run, own: RedisServedStore, redis_url: str
) -> None:
    """run-api and server have different run ids by default."""
    others = uuid.uuid4().hex
    await serve(own, OLD)
    async with RedisServedStore(redis_url, others) as record:
        await serve(record, NEW)
        await run.register(server_run_id=others)
        await run.submit(1)
        await serve(record, NEWEST)
        await run.submit(2)
        await run.register()
        await serve(record, OLD)
        await run.submit(3, 4)
    assert await received_under(run, after=0) == [(1, NEW), (2, NEWEST)]
    assert await received_under(run, after=1) == [(3, None), (4, None)]


async def test_a_reset_run_follows_one_server_alone(run: Run, redis_url: str) -> None:
    first, second = uuid.uuid4().hex, uuid.uuid4().hex
    await run.register(server_run_id=first)
    await run.store.reset()
    await run.register(server_run_id=second)
    async with (
        RedisServedStore(redis_url, first) as old,
        RedisServedStore(redis_url, second) as new,
    ):
        await serve(new, NEW)
        await serve(old, OLD)
        await run.submit(1, 2)
    assert await received_under(run, after=0) == [(1, NEW), (2, NEW)]


async def test_each_part_of_a_group_carries_the_version_served_when_it_arrived(
    run: Run, own: RedisServedStore
) -> None:
    env_id = await run.start_environment(group_size=4)
    for marker, version in ((1, None), (2, OLD), (3, NEW)):
        if version is not None:
            await serve(own, version)
        await run.submit(marker, size=1, env_id=env_id)
    run.link.repeats_scripts = True
    await run.submit(4, size=1, env_id=env_id)
    expected = [(1, None), (2, OLD), (3, NEW), (4, NEW)]
    assert await received_under(run, after=0) == expected


async def test_a_group_that_waited_for_room_carries_the_version_served_when_it_arrived(
    run: Run, own: RedisServedStore
) -> None:
    await serve(own, OLD)
    await run.submit(1, 2, 3, 4)
    held = await run.submit_to_the_line(5)
    await serve(own, NEW)
    await leased(run, after=0)
    await held
    await run.submit(6)
    await leased(run, after=1)
    assert await received_under(run, after=2) == [(5, OLD), (6, NEW)]


async def test_a_reset_forgets_groups_and_not_the_served_version(
    run: Run, own: RedisServedStore
) -> None:
    await serve(own, OLD)
    await run.store.reset()
    await run.register()
    await run.submit(1, 2)
    assert await received_under(run, after=0) == [(1, OLD), (2, OLD)]
