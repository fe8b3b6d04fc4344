"""Groups carry the version that the inference server wrote to Redis when they arrived."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from grpo_api.store.leases import Lease, Poll
from grpo_core.weights.ref import WeightKind, WeightRef
from grpo_core.wire.policy_version import PolicyVersion
from grpo_vllm.weights.served_store import RedisServedStore, ServedWeights
from tests.integration.run_store_rig import (
    LARGE,
    LIMITS,
    Run,
    open_run,
)
from tests.support.wait import DEADLINE_S

RUN_ID = "version-tests"
OLD, NEW, NEWEST = PolicyVersion(1, 9), PolicyVersion(2, 10), PolicyVersion(2, 11)


class VersionedRun:
    """A run, and the inference server's record of the served weights."""

    def __init__(self, run: Run, record: RedisServedStore, redis_url: str) -> None:
        self.run = run
        self.redis_url = redis_url
        self._record = record

    async def serve(self, version: PolicyVersion) -> None:
        await self._record.save(ServedWeights(WeightRef(version=version, kind=WeightKind.MEMORY)))

    async def leased(self, after: int) -> Lease:
        lease = await self.run.dispatcher.next_batch(Poll(self.run.trainer_id, after), 0.0)
        assert lease is not None
        return lease

    async def received_under(self, after: int) -> list[tuple[int, PolicyVersion | None]]:
        """The marker and the version of each group in the batch after `after`."""
        lease = await self.leased(after)
        markers = await self.run.markers(lease)
        assert markers is not None
        return list(zip(markers, (group.received_under for group in lease.groups), strict=True))


@pytest.fixture
async def versioned(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[VersionedRun]:
    # with the usual deadline, the record would reach Redis late on a slow machine
    monkeypatch.setattr("grpo_vllm.weights.served_store.ATTEMPT_DEADLINE_S", DEADLINE_S)
    async with (
        open_run(redis_url, RUN_ID, replace(LIMITS, queued_groups=4), full_s=DEADLINE_S) as run,
        RedisServedStore(redis_url, RUN_ID) as record,
    ):
        keys = run.link.served_weights, run.link.followed_server
        await run.link.call("DEL", *keys)
        yield VersionedRun(run, record, redis_url)
        await run.link.call("DEL", *keys)


async def test_groups_carry_the_version_served_when_they_arrived(versioned: VersionedRun) -> None:
    await versioned.run.submit(1)
    await versioned.serve(OLD)
    for _ in range(2):  # the run's own server stays
        await versioned.run.register(server_run_id=RUN_ID)
    await versioned.run.submit(2, 3)
    await versioned.serve(NEW)
    await versioned.run.submit(4, **LARGE)
    assert await versioned.received_under(after=0) == [(1, None), (2, OLD)]
    assert await versioned.received_under(after=1) == [(3, OLD), (4, NEW)]


async def test_groups_follow_the_server_that_the_trainer_names(versioned: VersionedRun) -> None:
    """run-api and server have different run ids by default."""
    run = versioned.run
    others = uuid.uuid4().hex
    await versioned.serve(OLD)
    async with RedisServedStore(versioned.redis_url, others) as record:
        other = VersionedRun(run, record, versioned.redis_url)
        await other.serve(NEW)
        await run.register(server_run_id=others)
        await run.submit(1)
        await other.serve(NEWEST)
        await run.submit(2)
        await run.register()
        await other.serve(OLD)
        await run.submit(3, 4)
    assert await versioned.received_under(after=0) == [(1, NEW), (2, NEWEST)]
    assert await versioned.received_under(after=1) == [(3, None), (4, None)]


async def test_a_reset_run_follows_one_server_alone(versioned: VersionedRun) -> None:
    first, second = uuid.uuid4().hex, uuid.uuid4().hex
    url, run = versioned.redis_url, versioned.run
    await run.register(server_run_id=first)
    await run.store.reset()
    await run.register(server_run_id=second)
    async with RedisServedStore(url, first) as old, RedisServedStore(url, second) as new:
        await VersionedRun(run, new, url).serve(NEW)
        await VersionedRun(run, old, url).serve(OLD)
        await run.submit(1, 2)
    assert await versioned.received_under(after=0) == [(1, NEW), (2, NEW)]


async def test_each_part_of_a_group_carries_the_version_served_when_it_arrived(
    versioned: VersionedRun,
) -> None:
    env_id = await versioned.run.start_environment(group_size=4)
    for marker, version in ((1, None), (2, OLD), (3, NEW)):
        if version is not None:
            await versioned.serve(version)
        await versioned.run.submit(marker, size=1, env_id=env_id)
    versioned.run.link.repeats_scripts = True
    await versioned.run.submit(4, size=1, env_id=env_id)
    expected = [(1, None), (2, OLD), (3, NEW), (4, NEW)]
    assert await versioned.received_under(after=0) == expected


async def test_a_group_that_waited_for_room_carries_the_version_served_when_it_arrived(
    versioned: VersionedRun,
) -> None:
    run = versioned.run
    await versioned.serve(OLD)
    await run.submit(1, 2, 3, 4)
    held = await run.submit_to_the_line(5)
    await versioned.serve(NEW)
    await versioned.leased(after=0)
    await held
    await run.submit(6)
    await versioned.leased(after=1)
    assert await versioned.received_under(after=2) == [(5, OLD), (6, NEW)]


async def test_a_reset_forgets_groups_and_not_the_served_version(versioned: VersionedRun) -> None:
    await versioned.serve(OLD)
    await versioned.run.store.reset()
    await versioned.run.register()
    await versioned.run.submit(1, 2)
    assert await versioned.received_under(after=0) == [(1, OLD), (2, OLD)]
