"""Sends commands and scripts to Redis, with one connection pool, one deadline and one error.

Also finds groups that Redis has lost: this process confirmed them, but Redis started without them.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any

import structlog
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import (
    InvalidResponse,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from grpo_api.errors import StoreUnavailable
from grpo_api.store.keys import RUN_KEYS
from grpo_core.redis.connection import client_options
from grpo_core.redis.keys import run_prefix, served_weights_key
from grpo_core.redis.url import without_password

LAYOUT = 4
"""Increases when keys or formats change that an earlier version reads, so that these never share
keys."""
_MAX_CONNECTIONS = 64
_REMEMBERED = 100_000
"""Groups. More than a Redis without persistence, which loses all, is likely to hold."""
_PING_DEADLINE_S = 1.0
_FAILOVER_RETRY_S = 0.1
_FIRST_BACKOFF_S = 0.02
_MAX_BACKOFF_S = 0.5
_UNTIL_THE_DEADLINE = -1
_REFUSALS = {
    "OOM": "the memory of Redis is full; acknowledge batches, or raise maxmemory",
    "MISCONF": "Redis cannot write to its disk; free disk space and read the log of Redis",
    "NOREPLICAS": "too few replicas are connected; start replicas, or lower min-replicas-to-write",
    "READONLY": "this Redis is a replica; set --redis-url to the primary",
}
"""Why Redis rejects writes and how to fix it, by the code at the start of its error."""
# The code is at the start, after Redis 6.2's text about a script, or after redis-py's about MULTI.
_refusal_code = re.compile(rf"(?:^|: -|\(['\"])({'|'.join(_REFUSALS)}) ").search

log = structlog.get_logger()


def layout_prefix(run_id: str, layout: int = LAYOUT) -> str:
    """The prefix of every key of run-api."""
    return f"{run_prefix(run_id)}{layout}:"


class RedisLink:
    """The connection to Redis. Repeats a command on a broken connection until `deadline_s`.

    Redis may have executed a command whose answer was lost. So a command that must not run twice
    has to detect its repeat, as the scripts do with a receipt or a batch id.
    """

    def __init__(self, url: str, run_id: str, deadline_s: float) -> None:
        self.run_id = run_id
        self.prefix = layout_prefix(run_id)
        self.served_weights = served_weights_key(run_id)
        self._run_keys = self.keys(*RUN_KEYS)
        self.followed_server = self.served_weights + ":followed"
        self.where = without_password(url)
        self.deadline_s = deadline_s
        self._redis = _client(url, deadline_s, redis_connect_func=self._begin)
        # Separate: listeners that also need a connection for commands could block each other.
        self._listeners = _client(url, deadline_s)
        self._scripts = _load_scripts(self._redis)
        script: Any = self._scripts["compare_start"].script
        self.confirmed = ConfirmedGroups(self.where, script, self._run_keys)

    async def close(self) -> None:
        await self._redis.aclose()
        await self._listeners.aclose()

    async def _begin(self, connection: AbstractConnection) -> None:
        await self.confirmed.compare(connection)

    async def ping(self) -> None:
        """Raises `StoreUnavailable` within a second, also if this Redis is a replica: a probe must
        not wait as long as a request."""
        async with _deadline(min(self.deadline_s, _PING_DEADLINE_S)):
            await self.call("PING")
            try:
                role = (await self.call("ROLE"))[0]
            except ResponseError:  # some managed services do not tell
                return
            if role == b"slave":
                await self._drop_idle_connections()
                raise StoreUnavailable(_rejection("READONLY"))

    async def call(self, *command: Any) -> Any:
        # redis-py leaves this method without types.
        return await self._on_the_primary(
            lambda: self._redis.execute_command(*command)  # type: ignore[no-untyped-call]
        )

    async def _on_the_primary(self, send: Callable[[], Awaitable[Any]]) -> Any:
        """Repeat what a replica rejects, until the deadline. After a failover, connections of the
        pool still lead to the former primary, and new ones to the new one."""
        async with _deadline(self.deadline_s):
            while True:
                try:
                    return await send()
                except ResponseError as error:
                    if _code_of_refusal(error) != "READONLY":
                        raise
                    await self._drop_idle_connections()
                    await asyncio.sleep(_FAILOVER_RETRY_S)

    async def _drop_idle_connections(self) -> None:
        await self._redis.connection_pool.disconnect(inuse_connections=False)

    def keys(self, *names: str) -> list[str]:
        return [self.prefix + name for name in names]

    async def script(self, name: str, *arguments: Any, own_keys: Sequence[str] = ()) -> Any:
        """Run a script. Its KEYS are `RUN_KEYS` and then those of this call."""
        keys = [*self._run_keys, *own_keys]
        return await self._on_the_primary(lambda: self._scripts[name](keys=keys, args=arguments))

    async def transaction(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Run all commands as one atomic transaction."""
        answers: list[Any] = await self._on_the_primary(lambda: self._executed(commands))
        return answers

    async def _executed(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        async with self._redis.pipeline(transaction=True) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            try:
                answers: list[Any] = await pipeline.execute()
            except OutOfMemoryError:
                # With full memory MULTI rejects even commands that only read, and runs none. The
                # script is slower, because Redis copies its answers once more.
                words = [word for command in commands for word in (len(command), *command)]
                answers = await self._scripts["multi_exec"](args=words)
            return answers

    async def append_only_file_bytes(self) -> int | None:
        """None if Redis does not tell, as managed services, or has no such file."""
        try:
            size = (await self.call("INFO", "persistence")).get("aof_current_size")
        except ResponseError:
            return None
        return None if size is None else int(size)

    @asynccontextmanager
    async def listening(self, channel: str) -> AsyncIterator[None]:
        """Listen to `channel` during the block, so that Redis counts one listener.

        The count drops if the connection breaks or the process is killed.
        """
        async with self._listeners.pubsub() as pubsub:
            async with _deadline(self.deadline_s):
                await pubsub.subscribe(channel)
                await pubsub.parse_response()
            yield


class ConfirmedGroups:
    """The newest groups that this process confirmed to their senders, to find those that are lost.

    A Redis that is killed, or that a replica replaces, may start with older data, and every
    connection to it is new. So each new connection first compares what this process remembers with
    what Redis had at its start. The trainer finds batches that were lost: it remembers the newest
    one.

    Args:
        where: the Redis, for the log
        script, keys: `compare_start.lua`
    """

    def __init__(self, where: str, script: str, keys: list[str]) -> None:
        self._where = where
        self._command = ("EVAL", script, len(keys), *keys, os.urandom(8).hex())
        self._ids: deque[int] = deque(maxlen=_REMEMBERED)
        self._redis_process = b""
        self._unstored = 0

    def note(self, last_id: int, groups: int) -> None:
        """Remember groups with consecutive ids, which Redis has stored."""
        self._ids.extend(range(last_id - groups + 1, last_id + 1))

    async def compare(self, connection: AbstractConnection) -> None:
        """Begin a connection. If it is the first one to another Redis process, count the groups
        that this one lacks."""
        await connection.on_connect()
        process, had = await self._send(connection)
        if process == self._redis_process:
            return
        lost = sum(group_id > had for group_id in self._ids)
        self._ids.clear()
        self._redis_process = process
        if lost:
            self._unstored += lost
            log.error(
                "redis.lost_groups",
                groups=lost,
                redis=self._where,
                hint="Redis started without groups that run-api had accepted. To lose none, run "
                "Redis with --appendonly yes --appendfsync always",
            )
            await self._send(connection)
            self._unstored = 0

    async def _send(self, connection: AbstractConnection) -> Any:
        await connection.send_command(*self._command, self._unstored)
        return await connection.read_response()


@asynccontextmanager
async def _deadline(deadline_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(deadline_s):
            yield
    except TimeoutError as error:
        failure = _last_failure(error)
        if code := _code_of_refusal(failure):
            raise StoreUnavailable(_rejection(code)) from error
        reason = f": {failure}" if failure else ""
        raise StoreUnavailable(f"Redis did not answer within {deadline_s:g} s{reason}") from error
    except (RedisConnectionError, RedisTimeoutError) as error:
        raise StoreUnavailable(f"Redis is unreachable: {error}") from error
    except InvalidResponse as error:
        raise StoreUnavailable(
            f"the answer is not Redis' protocol ({error}); check that --redis-url names Redis"
        ) from error
    except RuntimeError as error:  # raised by uvloop; redis-py does not convert it
        if "handler is closed" not in str(error):
            raise
        raise StoreUnavailable("Redis closed a connection; send the request again") from error
    except ResponseError as error:
        if code := _code_of_refusal(error):
            raise StoreUnavailable(_rejection(code)) from error
        raise


def _rejection(code: str) -> str:
    return f"Redis rejects writes ({code}): {_REFUSALS[code]}"


def _code_of_refusal(error: RedisError | None) -> str | None:
    """A key of `_REFUSALS`, or None. redis-py replaces two of the codes with classes."""
    if isinstance(error, OutOfMemoryError):
        return "OOM"
    if isinstance(error, ReadOnlyError):
        return "READONLY"
    found = _refusal_code(str(error)) if isinstance(error, ResponseError) else None
    return found[1] if found else None


def _last_failure(error: BaseException | None) -> RedisError | None:
    """The error of the last attempt before the deadline, which the cancellation hides."""
    while error is not None and not isinstance(error, RedisError):
        error = error.__cause__ or error.__context__
    return error


def _client(url: str, deadline_s: float, **options: Any) -> Redis:
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=_MAX_CONNECTIONS,
        timeout=deadline_s,
        socket_connect_timeout=deadline_s,
        socket_timeout=deadline_s,
        retry=Retry(
            ExponentialBackoff(cap=_MAX_BACKOFF_S, base=_FIRST_BACKOFF_S), _UNTIL_THE_DEADLINE
        ),
        protocol=2,
        **client_options(url),
        **options,
    )
    client: Redis = Redis.from_pool(pool)
    return client


def _load_scripts(redis: Redis) -> dict[str, AsyncScript]:
    folder = resources.files("grpo_api.store") / "lua"
    keys = f"local {', '.join(RUN_KEYS)} = unpack(KEYS)\n"
    own_keys = f"local own_keys = {{unpack(KEYS, {len(RUN_KEYS) + 1})}}\n"
    common = keys + own_keys + (folder / "common.lua").read_text()
    return {
        file.name.removesuffix(".lua"): redis.register_script(common + file.read_text())
        for file in folder.iterdir()
        if file.name.endswith(".lua")
    }
