"""No data is left in Redis after batches and runs end."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.integration.run_store_rig import Run, open_run


@pytest.fixture
async def run(redis_url: str) -> AsyncIterator[Run]:
    async with open_run(redis_url, "state-tests") as run:
        yield run


async def test_nothing_is_left_of_acknowledged_groups(run: Run) -> None:
    env_id = await run.start_environment()
    for marker in range(0, 20, 2):
        await run.submit(marker)
        await run.submit(marker + 1, marker + 1, size=1, env_id=env_id)
        assert await run.poll() == [marker, marker + 1, marker + 1]
    assert await run.poll() is None
    assert await run.payloads() == 1  # the latest example
    view = await run.store.registrations.view()
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
        f"{run.link.prefix}{name}".encode() for name in ("resets", "last_group_id", "last_env_id")
    }
    assert set(keys) - set(receipts) == outlive
    assert all([await run.link.call("TTL", key) > 0 for key in receipts])
