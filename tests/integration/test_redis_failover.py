"""A failover: the address of Redis leads to the former replica, and the former primary lives on as
its replica."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from grpo_api.errors import StoreUnavailable
from grpo_api.store.redis import RedisLink
from grpo_core.redis.connection import AsyncRedisConnection, RedisConnection
from grpo_runs.process.ports import free_port
from tests.support.redis_server import start_redis
from tests.support.wait import DEADLINE_S, wait_for

CONNECTIONS = 8


@dataclass
class Pair:
    """`primary`: the port to which new connections to `url` lead"""

    primary: int
    replica: int
    url: str = ""

    def replicates(self) -> None:
        with redis.Redis(port=self.replica) as admin:
            admin.replicaof("127.0.0.1", self.primary)
            wait_for(lambda: admin.info("replication"), lambda told: _is_up(told))

    def fail_over(self) -> None:
        with redis.Redis(port=self.replica) as admin:
            admin.replicaof("NO", "ONE")
        self.primary, self.replica = self.replica, self.primary
        self.replicates()

    def holds(self) -> bytes | None:
        with redis.Redis(port=self.primary) as admin:
            found: bytes | None = admin.get("key")
            return found


def _is_up(told: dict[str, str]) -> bool:
    return told.get("master_link_status") == "up"


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    ports = free_port(), free_port()
    with contextlib.ExitStack() as stack:
        for port in ports:
            process = start_redis(port, tmp_path / str(port))
            stack.callback(process.stop)
        found = Pair(*ports)
        found.replicates()
        pipes: set[asyncio.Task[None]] = set()

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection("127.0.0.1", found.primary)
            for one, other in ((reader, back), (there, writer)):
                pipes.add(asyncio.create_task(_pipe(one, other)))

        server = await asyncio.start_server(pass_on, "127.0.0.1", 0)
        found.url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
        yield found
        server.close()
        for pipe in pipes:
            pipe.cancel()


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def test_run_api_trainer_and_server_find_the_new_primary(pair: Pair) -> None:
    link = RedisLink(pair.url, "failover", DEADLINE_S)
    connection = AsyncRedisConnection(pair.url, DEADLINE_S)
    with RedisConnection(pair.url, DEADLINE_S, DEADLINE_S) as blocking:
        await asyncio.gather(*(link.call("SET", "key", "before") for _ in range(CONNECTIONS)))
        await connection.call("SET", "key", "before")
        await asyncio.to_thread(blocking.call, "SET", "key", "before")
        pair.fail_over()
        await asyncio.gather(*(link.call("SET", "key", "run-api") for _ in range(CONNECTIONS)))
        await link.ping()
        assert pair.holds() == b"run-api"
        await link.transaction(("SET", "key", "in a transaction"))
        assert pair.holds() == b"in a transaction"
        await connection.call("SET", "key", "server")
        assert pair.holds() == b"server"
        await asyncio.to_thread(blocking.call, "SET", "key", "trainer")
        assert pair.holds() == b"trainer"
    await link.close()
    await connection.close()


async def test_a_probe_of_a_replica_says_so(pair: Pair) -> None:
    link = RedisLink(f"redis://127.0.0.1:{pair.replica}/0", "failover", DEADLINE_S)
    with pytest.raises(StoreUnavailable, match=r"READONLY.*set --redis-url to the primary"):
        await link.ping()
    impatient = RedisLink(f"redis://127.0.0.1:{pair.replica}/0", "failover", 0.5)
    with pytest.raises(StoreUnavailable, match=r"READONLY.*set --redis-url to the primary"):
        await impatient.call("SET", "key", "value")
    await link.close()
    await impatient.close()
