"""The versions of a run in a real Redis."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from redis import Redis

from grpo_core.weights.servers import ServerState, ServerStatus, server_key
from grpo_core.weights.version_log import ServerVersionLog, Slot, TrainerReplaced, VersionLog
from grpo_core.weights.versions import Announcement, VersionKind
from grpo_core.wire.policy_version import PolicyVersion
from tests.support.wait import DEADLINE_S

SOURCE = "http://trainer:26756/weights"


def version(epoch: int, step: int, digest: str = "") -> Announcement:
    return Announcement(epoch=epoch, step=step, kind=VersionKind.FULL, digest=digest)


@pytest.fixture
def run_id() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def trainer(redis_url: str, run_id: str) -> Iterator[VersionLog]:
    with VersionLog(redis_url, run_id, DEADLINE_S) as log:
        yield log


@pytest.fixture
async def server(redis_url: str, run_id: str) -> AsyncIterator[ServerVersionLog]:
    async with ServerVersionLog(redis_url, run_id, "a") as log:
        yield log


async def test_a_server_sees_what_the_trainer_announces(
    trainer: VersionLog, server: ServerVersionLog
) -> None:
    assert await server.head() is None
    assert await server.next(PolicyVersion(0, 0)) is None
    for step in (1, 2, 3):
        trainer.announce(version(1, step), [SOURCE])
    assert await server.next(PolicyVersion(1, 1)) == version(1, 3) == trainer.head()
    found = await server.between(PolicyVersion(1, 1), PolicyVersion(1, 3))
    assert found == [version(1, 2), version(1, 3)]
    assert await server.next(PolicyVersion(1, 3)) is None
    await server.add_source(PolicyVersion(1, 3), "http://peer")
    assert await server.sources(PolicyVersion(1, 3)) == [SOURCE]
    assert await server.peers(PolicyVersion(1, 3), 2) == ["http://peer"]
    await server.remove_source(PolicyVersion(1, 3), "http://peer")
    assert await server.peers(PolicyVersion(1, 3), 2) == []
    await server.add_source(PolicyVersion(1, 3), "http://peer")
    trainer.forget([PolicyVersion(1, 3)])
    assert await server.sources(PolicyVersion(1, 3)) == []
    assert await server.peers(PolicyVersion(1, 3), 2) == []


def test_a_replaced_trainer_announces_nothing(trainer: VersionLog) -> None:
    trainer.announce(version(2, 0, "a" * 64))
    trainer.announce(version(2, 0, "a" * 64))  # it repeats itself after a lost answer
    for zombie in (version(1, 7), version(2, 0, "b" * 64)):
        with pytest.raises(TrainerReplaced, match=r"newest announced version is \(2, 0\)"):
            trainer.announce(zombie)
    assert trainer.head() == version(2, 0, "a" * 64)


async def test_two_servers_at_most_fetch_from_one_source(
    redis_url: str, run_id: str, server: ServerVersionLog
) -> None:
    async with (
        ServerVersionLog(redis_url, run_id, "b") as second,
        ServerVersionLog(redis_url, run_id, "c") as third,
    ):
        first, last = Slot(SOURCE, 0), Slot(SOURCE, 1)
        taken = [await log.take_slot([SOURCE]) for log in (server, second, third)]
        assert taken == [first, last, None]
        assert await server.renew_slot(first)
        assert not await third.renew_slot(first)
        await second.release_slot(first)  # is not its own
        assert await third.take_slot([SOURCE]) is None
        assert await third.take_slot([SOURCE, "http://peer"]) == Slot("http://peer", 0)
        await server.release_slot(first)
        assert await third.take_slot([SOURCE, "http://peer"]) == first


async def test_a_server_reports_itself_until_it_leaves(
    trainer: VersionLog, server: ServerVersionLog
) -> None:
    status = ServerStatus(
        name="a", epoch=1, step=4, state=ServerState.SERVING, in_use="1-3 1-4", fetching="1-5"
    )
    await server.report(status)
    assert trainer.servers() == [status]
    assert status.versions_in_use == {"1-3", "1-4", "1-5"}
    await server.leave()
    assert trainer.servers() == []


async def test_a_report_that_is_cut_off_leaves_no_server_that_never_goes(
    redis_url: str,
    trainer: VersionLog,
    server: ServerVersionLog,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server ends after any of its commands."""
    attempt, sent = server.attempt, 0

    async def first_only(*command: Any) -> Any:
        nonlocal sent
        sent += 1
        return await attempt(*command) if sent == 1 else await asyncio.Event().wait()

    monkeypatch.setattr(server, "attempt", first_only)
    status = ServerStatus(name="a", epoch=1, step=4, state=ServerState.SERVING)
    async with asyncio.timeout(DEADLINE_S):
        await server.report(status)
    assert trainer.servers() == [status]
    with Redis.from_url(redis_url, decode_responses=True) as redis:
        assert redis.pttl(server_key(trainer.run_id, "a")) > 0
