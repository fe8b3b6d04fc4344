"""Records of inference servers in a real Redis: the served weights, and the claim of a run."""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis
from structlog.testing import capture_logs

from grpo_core.redis.keys import run_prefix, served_weights_key
from grpo_core.weights.ref import WeightKind, WeightRef
from grpo_core.wire.policy_version import PolicyVersion
from grpo_runs.process.ports import free_port
from grpo_vllm.supervisor import ownership
from grpo_vllm.supervisor.ownership import RunOwner, ServerExists
from grpo_vllm.weights import served_store
from grpo_vllm.weights.served_store import (
    BadServedRecord,
    RedisServedStore,
    RedisUnreachable,
    ServedWeights,
)
from tests.support.redis_server import OwnRedis, start_redis
from tests.support.wait import DEADLINE_S, wait_for_async

NEVER_AGAIN_S = 1000.0
FIRST = ServedWeights(WeightRef(version=PolicyVersion(1, 0)))
TORN = ServedWeights(WeightRef(version=PolicyVersion(2, 4), kind=WeightKind.MEMORY), intact=False)
LATEST = ServedWeights(
    WeightRef(version=PolicyVersion(3, 4), kind=WeightKind.ADAPTER, path=Path("/a"), digest="0f"),
    model="m",
)


@pytest.fixture(autouse=True)
def patient_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow Redis must not count as unreachable."""
    monkeypatch.setattr(served_store, "ATTEMPT_DEADLINE_S", DEADLINE_S)
    monkeypatch.setattr(served_store, "LAST_ATTEMPT_DEADLINE_S", DEADLINE_S)
    monkeypatch.setattr(served_store, "RETRY_S", 0.02)


@pytest.fixture
def run_id() -> str:
    return uuid.uuid4().hex


@pytest.fixture
async def record(redis_url: str, run_id: str) -> AsyncIterator[RedisServedStore]:
    async with RedisServedStore(redis_url, run_id) as record:
        yield record


async def stored(url: str, run_id: str) -> ServedWeights | None:
    async with RedisServedStore(url, run_id) as reader:
        return await reader.read(DEADLINE_S)


async def test_the_next_server_of_a_run_reads_the_latest_note(
    record: RedisServedStore, redis_url: str, run_id: str
) -> None:
    assert await record.read(DEADLINE_S) is None
    for served in (FIRST, TORN, LATEST):
        await record.save(served)
        assert await stored(redis_url, run_id) == served
    assert await stored(redis_url, "another run") is None


async def test_an_older_version_of_another_server_does_not_replace_the_record(
    record: RedisServedStore, redis_url: str, run_id: str
) -> None:
    for served in (LATEST, FIRST):
        await record.save(served)
    assert await stored(redis_url, run_id) == LATEST


async def test_a_foreign_value_under_the_key_is_named(
    record: RedisServedStore, redis_url: str, run_id: str
) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.hset(served_weights_key(run_id), "epoch", "many")
        with pytest.raises(BadServedRecord, match=r"served-weights.*delete this"):
            await record.read(DEADLINE_S)


async def test_no_redis_is_a_named_error_without_the_password() -> None:
    url = f"redis://:secret@127.0.0.1:{free_port()}/0"
    async with RedisServedStore(url, "run") as record:
        with pytest.raises(RedisUnreachable, match=r"did not answer within 0\.1 s") as raised:
            await record.read(0.1)
    assert "pass --redis-url none to serve the model" in str(raised.value)
    assert "secret" not in str(raised.value)


async def test_a_record_that_could_not_be_read_is_not_replaced_by_the_model(
    tmp_path: Path, run_id: str
) -> None:
    server = OwnRedis(tmp_path)
    async with RedisServedStore(server.url, run_id) as record:
        await record.save(TORN)
    server.process.stop()
    async with RedisServedStore(server.url, run_id, required=False) as late:
        assert await late.read(DEADLINE_S) is None
        server.start()
        await late.save(FIRST)
        assert await stored(server.url, run_id) == TORN
        await late.save(LATEST)
        assert await stored(server.url, run_id) == LATEST
    server.process.stop()


class NotesAttempts(RedisServedStore):
    """A record that stores the deadline of each attempt."""

    def __init__(self, url: str, run_id: str) -> None:
        super().__init__(url, run_id)
        self.deadlines_s: list[float | None] = []

    async def _write(self, served: ServedWeights, deadline_s: float | None = None) -> bool:
        self.deadlines_s.append(deadline_s)
        return await super()._write(served, deadline_s)


@pytest.mark.parametrize("ends", [False, True])
async def test_a_redis_that_was_away_gets_the_latest_note_once_it_is_back_or_the_server_ends(
    ends: bool, tmp_path: Path, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ends:
        monkeypatch.setattr(served_store, "RETRY_S", NEVER_AGAIN_S)
    port = free_port()
    url = f"redis://127.0.0.1:{port}/0"
    record = RedisServedStore(url, run_id)
    for served in (FIRST, LATEST):
        await record.save(served)
    server = await asyncio.to_thread(start_redis, port, tmp_path)
    try:
        if not ends:
            await wait_for_async(lambda: record._catching_up is None)
            assert await stored(url, run_id) == LATEST
        await record.close()
        assert await stored(url, run_id) == LATEST
    finally:
        server.stop()


async def test_a_redis_that_hangs_costs_one_attempt_and_one_more_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served_store, "RETRY_S", NEVER_AGAIN_S)
    monkeypatch.setattr(served_store, "ATTEMPT_DEADLINE_S", 0.1)
    monkeypatch.setattr(served_store, "LAST_ATTEMPT_DEADLINE_S", 0.2)
    # accepts connections and never answers
    with socket.create_server(("127.0.0.1", 0)) as hanging, capture_logs() as events:
        url = f"redis://127.0.0.1:{hanging.getsockname()[1]}/0"
        async with NotesAttempts(url, "run") as record:
            for served in (FIRST, TORN, LATEST):
                await record.save(served)
            assert len(record.deadlines_s) == 1
        # The last write may take longer, because no later write replaces it.
        assert record.deadlines_s == [None, 0.2]
    assert events[-1]["event"] == "served_version.not_saved"


async def test_a_server_that_lost_its_run_ends(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was suspended until its claim had expired, and another server took the run."""
    monkeypatch.setattr(ownership, "RENEW_S", 0.01)
    run_id = uuid.uuid4().hex
    async with RunOwner(redis_url, run_id, "a") as first, RunOwner(redis_url, run_id, "a") as late:
        first._owner.place = "another host"
        await first.claim()
        await first.attempt("DEL", run_prefix(run_id) + "owner:a")
        await late.claim()
        with pytest.raises(ServerExists, match="--server-name a: another"):
            await first.hold()


async def test_the_name_of_a_server_that_ended_is_free_at_once(redis_url: str) -> None:
    run_id = uuid.uuid4().hex
    first, second = (RunOwner(redis_url, run_id, "a") for _ in range(2))
    await first.claim()  # the same process id as the second one: its predecessor
    await second.claim()
    assert await second._ask() is None
    await second.close()
    assert await first.attempt("EXISTS", run_prefix(run_id) + "owner:a") == 0
    await first.close()


@pytest.mark.parametrize("sharing", ["a", "b", "a b"])
async def test_a_server_that_shares_its_weights_is_alone_in_its_run(
    sharing: str, redis_url: str
) -> None:
    run_id = uuid.uuid4().hex
    owners = (RunOwner(redis_url, run_id, name, name in sharing) for name in ("a", "b"))
    async with next(owners) as first, next(owners) as second:
        first._owner.place = "another host"
        first._written = first._owner.model_dump_json()
        assert await first._ask() is None
        held = await second._ask()
        assert held is not None
        told = str(second._exists(held))
        assert f"{sharing[0]} shares its weights" in told
        assert "another vllm-api-server, a, serves this run" in told


async def test_servers_of_different_names_share_a_run(redis_url: str) -> None:
    run_id = uuid.uuid4().hex
    async with RunOwner(redis_url, run_id, "a") as first, RunOwner(redis_url, run_id, "b") as other:
        first._owner.place = "another host"
        first._written = first._owner.model_dump_json()
        await first.claim()
        await other.claim()
        assert await first._ask() is None
