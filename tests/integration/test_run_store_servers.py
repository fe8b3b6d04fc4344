"""The list of inference servers in `/status-env`, from the records that servers write."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from grpo_api.store.servers import READ_EVERY_S, ServerCounts, ServerRecords
from grpo_core.weights.servers import ServerState, ServerStatus, server_key, servers_key
from grpo_core.weights.version_log import ServerVersionLog
from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.run_api import ListedServer
from tests.integration.run_store_rig import Run

SERVING, FAILED = ServerState.SERVING, ServerState.FAILED


@asynccontextmanager
async def server(
    redis_url: str, run_id: str, name: str, step: int, url: str | None = None
) -> AsyncIterator[ServerVersionLog]:
    """A server that has reported itself once."""
    async with ServerVersionLog(redis_url, run_id, name) as log:
        where = f"http://{name}:9001" if url is None else url
        await log.report(ServerStatus(name=name, url=where, state=SERVING, epoch=1, step=step))
        yield log


def listed(name: str, step: int, state: str = SERVING) -> ListedServer:
    version = PolicyVersion(1, step)
    return ListedServer(name=name, url=f"http://{name}:9001", version=version, state=state)


async def test_the_servers_that_are_not_gone_are_listed_and_counted(
    run: Run, redis_url: str
) -> None:
    own, now = run.link.run_id, [0.0]
    records = ServerRecords(run.link, lambda: now[0])
    assert await ServerRecords(run.link).counted() is None
    async with (
        server(redis_url, own, "b", 4) as b,
        server(redis_url, own, "a", 5) as a,
        server(redis_url, own, "unreachable", 5, url=""),
    ):
        assert await records.listed() == [listed("a", 5), listed("b", 4)]
        fields = {"name": "b", "url": "http://b:9001", "epoch": 1, "step": 4}
        await b.report(ServerStatus(**fields, state=FAILED, crashes=2, restarts=3))
        await a.leave()
        assert len(await records.listed()) == 2  # not read again so soon
        now[0] = READ_EVERY_S
        assert await records.listed() == [listed("b", 4, FAILED)]
        counts = [ServerCounts("b", FAILED, 4, 3, 2), ServerCounts("unreachable", SERVING, 5, 0, 0)]
        assert await records.counted() == counts, "one that left is not missed"
        await run.link.call("DEL", server_key(own, "b"))  # as if its report had expired
        assert await records.counted() == [ServerCounts("b", "", 0, 0, 0), counts[1]]
    names = ("a", "b", "unreachable")
    await run.link.call("DEL", servers_key(own), *(server_key(own, name) for name in names))


async def test_the_servers_are_those_that_the_trainer_names(run: Run, redis_url: str) -> None:
    others = uuid.uuid4().hex
    async with server(redis_url, others, "a", 5):
        assert await run.store.servers.listed() == []
        await run.register(server_run_id=others)
        assert await run.store.servers.listed() == [listed("a", 5)]
        await run.register()
        assert await run.store.servers.listed() == []
