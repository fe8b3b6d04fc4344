"""What a run was served, remembered in a real Redis that may be away."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis
from structlog.testing import capture_logs

from grpo_core.redis_names import served_weights_key
from grpo_core.wire import PolicyVersion
from grpo_local.ports import free_port
from grpo_local.redis_server import bundled_redis, start_redis
from grpo_vllm import served_record
from grpo_vllm.served_record import (
    BadServedRecord,
    RedisUnreachable,
    ServedRecord,
    ServedWeights,
)

FIRST = ServedWeights(PolicyVersion(1, 0), intact=True, trained=True)
TORN = ServedWeights(PolicyVersion(2, 4), intact=False, trained=True)
LATEST = ServedWeights(PolicyVersion(3, 4), intact=True, trained=False)
DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def patient_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Redis that is merely slow to answer is not away."""
    monkeypatch.setattr(served_record, "ATTEMPT_DEADLINE_S", DEADLINE_S)
    monkeypatch.setattr(served_record, "LAST_ATTEMPT_DEADLINE_S", DEADLINE_S)


@pytest.fixture
def run_id() -> str:
    return uuid.uuid4().hex


@pytest.fixture
async def record(redis_url: str, run_id: str) -> AsyncIterator[ServedRecord]:
    async with ServedRecord(redis_url, run_id) as record:
        yield record


async def test_a_run_that_was_served_nothing(record: ServedRecord) -> None:
    assert await record.read(DEADLINE_S) is None


@pytest.mark.parametrize("served", [FIRST, TORN, LATEST])
async def test_the_next_server_of_the_run_reads_what_the_last_one_noted(
    record: ServedRecord, redis_url: str, run_id: str, served: ServedWeights
) -> None:
    await record.note(FIRST)
    await record.note(served)
    async with ServedRecord(redis_url, run_id) as next_server:
        assert await next_server.read(DEADLINE_S) == served
    async with ServedRecord(redis_url, "another run") as other_run:
        assert await other_run.read(DEADLINE_S) is None


async def test_somebody_elses_value_under_the_key_is_named(
    record: ServedRecord, redis_url: str, run_id: str
) -> None:
    key = served_weights_key(run_id)
    with redis.Redis.from_url(redis_url) as client:
        client.hset(key, "epoch", "many")
        with pytest.raises(BadServedRecord, match=r"served-weights.*delete that key"):
            await record.read(DEADLINE_S)
        client.delete(key)


async def test_no_redis_is_a_named_error_within_the_deadline() -> None:
    url = f"redis://:secret@127.0.0.1:{free_port()}/0"
    async with ServedRecord(url, "run") as record:
        started = time.monotonic()
        with pytest.raises(RedisUnreachable, match=r"did not answer within 0\.5 s") as raised:
            await record.read(0.5)
        assert time.monotonic() - started < DEADLINE_S
    assert "leave it out to serve the checkpoint" in str(raised.value)
    assert "secret" not in str(raised.value)


async def test_a_redis_that_hangs_costs_one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    attempt_s = 0.5
    monkeypatch.setattr(served_record, "ATTEMPT_DEADLINE_S", attempt_s)
    monkeypatch.setattr(served_record, "LAST_ATTEMPT_DEADLINE_S", attempt_s)
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        port = hanging.getsockname()[1]
        async with ServedRecord(f"redis://127.0.0.1:{port}/0", "run") as record:
            started = time.monotonic()
            for served in (FIRST, TORN, LATEST):
                await record.note(served)
            assert attempt_s <= time.monotonic() - started < DEADLINE_S
            assert connections_to(hanging) == 1  # each attempt makes its own


def connections_to(server: socket.socket) -> int:
    """That wait to be accepted."""
    server.setblocking(False)
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            server.accept()[0].close()
            count += 1
    return count


class CountsAttempts(ServedRecord):
    """To write, each of which may wait for a Redis that is away."""

    attempts = 0

    async def _write(self, served: ServedWeights, deadline_s: float | None = None) -> bool:
        self.attempts += 1
        return await super()._write(served, deadline_s)


class NotedMeanwhile(ServedRecord):
    """Is told of other weights while the first are on their way to Redis."""

    async def _write(self, served: ServedWeights, deadline_s: float | None = None) -> bool:
        written = await super()._write(served, deadline_s)
        if written and served == FIRST:
            await self.note(LATEST)
        return written


async def test_what_is_noted_while_redis_catches_up_arrives_as_well(
    tmp_path: Path, run_id: str
) -> None:
    port = free_port()
    async with NotedMeanwhile(f"redis://127.0.0.1:{port}/0", run_id) as record:
        await record.note(FIRST)
        server = await asyncio.to_thread(start_redis, port, tmp_path, bundled_redis())
        try:
            async with asyncio.timeout(DEADLINE_S):
                while await record.read(DEADLINE_S) != LATEST:
                    await asyncio.sleep(0.05)
        finally:
            server.stop()


async def test_a_redis_that_is_away_neither_stops_nor_slows_and_learns_the_latest_later(
    tmp_path: Path, run_id: str
) -> None:
    port = free_port()
    url = f"redis://127.0.0.1:{port}/0"
    async with CountsAttempts(url, run_id) as record:
        for served in (FIRST, TORN, LATEST):
            await record.note(served)
        assert record.attempts == 1
        server = await asyncio.to_thread(start_redis, port, tmp_path, bundled_redis())
        try:
            async with asyncio.timeout(DEADLINE_S):
                while await record.read(DEADLINE_S) != LATEST:
                    await asyncio.sleep(0.05)
            await record.note(FIRST)  # at once again
            assert await record.read(DEADLINE_S) == FIRST
        finally:
            server.stop()


@pytest.fixture
def never_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt that failed is not repeated while a test lasts."""
    monkeypatch.setattr(served_record, "RETRY_S", 1000.0)


@pytest.mark.usefixtures("never_again")
async def test_what_redis_has_not_learned_when_the_server_ends_is_written_then(
    tmp_path: Path, run_id: str
) -> None:
    port = free_port()
    url = f"redis://127.0.0.1:{port}/0"
    record = ServedRecord(url, run_id)
    for served in (FIRST, LATEST):
        await record.note(served)
    server = await asyncio.to_thread(start_redis, port, tmp_path, bundled_redis())
    try:
        await record.close()
        async with ServedRecord(url, run_id) as next_server:
            assert await next_server.read(DEADLINE_S) == LATEST
    finally:
        server.stop()


@pytest.mark.usefixtures("never_again")
async def test_the_last_attempt_waits_for_a_redis_that_stands_still(
    redis_url: str, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt_s = 0.5
    record = ServedRecord(redis_url, run_id)
    with redis.Redis.from_url(redis_url) as client:
        client.client_pause(1000 * int(DEADLINE_S), all=False)
        try:
            monkeypatch.setattr(served_record, "ATTEMPT_DEADLINE_S", attempt_s)
            await record.note(LATEST)
            closing = asyncio.create_task(record.close())
            await asyncio.wait([closing], timeout=2 * attempt_s)
            assert not closing.done()
        finally:
            client.client_unpause()
    await closing
    monkeypatch.setattr(served_record, "ATTEMPT_DEADLINE_S", DEADLINE_S)
    async with ServedRecord(redis_url, run_id) as next_server:
        assert await next_server.read(DEADLINE_S) == LATEST


@pytest.mark.usefixtures("never_again")
async def test_a_redis_that_stays_away_holds_up_the_end_for_one_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served_record, "ATTEMPT_DEADLINE_S", 0.1)
    monkeypatch.setattr(served_record, "LAST_ATTEMPT_DEADLINE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as hanging, capture_logs() as events:
        port = hanging.getsockname()[1]
        async with CountsAttempts(f"redis://127.0.0.1:{port}/0", "run") as record:
            await record.note(FIRST)
        assert record.attempts == 2
    assert events[-1]["event"] == "the weights served last are not in Redis"
