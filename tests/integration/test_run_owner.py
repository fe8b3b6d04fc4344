"""One server at a time serves a run."""

from __future__ import annotations

import uuid

import pytest

from grpo_core.redis.keys import run_prefix
from grpo_vllm.supervisor import ownership
from grpo_vllm.supervisor.ownership import RunOwner, ServerExists


async def test_a_server_that_lost_its_run_ends(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was suspended until its claim had expired, and another server took the run."""
    monkeypatch.setattr(ownership, "RENEW_S", 0.01)
    run_id = uuid.uuid4().hex
    async with RunOwner(redis_url, run_id, 1) as first, RunOwner(redis_url, run_id, 2) as second:
        first._owner.place = "another host"
        await first.claim()
        await first.attempt("DEL", run_prefix(run_id) + "server:owner")
        await second.claim()
        with pytest.raises(ServerExists, match="port 2"):
            await first.hold()


async def test_the_run_of_a_server_that_ended_is_free_at_once(redis_url: str) -> None:
    run_id = uuid.uuid4().hex
    first, second = (RunOwner(redis_url, run_id, port) for port in (1, 2))
    await first.claim()  # the same process id as the second one: its predecessor
    await second.claim()
    assert await second._ask() is None
    await second.close()
    assert await first.attempt("EXISTS", run_prefix(run_id) + "server:owner") == 0
    await first.close()
