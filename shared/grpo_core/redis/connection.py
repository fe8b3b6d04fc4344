"""Connections to Redis that retry until a deadline. run-api's store has its own.

redis-py's own retries are off, because they have no deadline. Redis may have executed a command
whose answer was lost, so the sender decides whether to repeat it. Answers are text.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any
from urllib.parse import urlsplit

import structlog
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import ReadOnlyError, RedisError
from redis.retry import Retry

from grpo_core.closing import ClosesOnAsyncExit, ClosesOnExit
from grpo_core.deadline import Deadline
from grpo_core.errors import ServiceUnavailable
from grpo_core.listening import is_own_listener
from grpo_core.redis.url import LOCAL_REDIS, known_password, local_redis_directory, without_password
from grpo_core.sockets import TCP_OPTIONS

log = structlog.get_logger()

FAILURES = (RedisError, OSError, TimeoutError)
RETRY_S, ASYNC_RETRY_S = 0.2, 0.5


def words(fields: dict[str, Any]) -> list[Any]:
    """`{name: value}` → `[name, value]`, the arguments of HSET and XADD."""
    return [word for field in fields.items() for word in field]


class RedisConnection(ClosesOnExit):
    """A blocking connection.

    Args:
        attempt_s: limit on one attempt
        deadline_s: how long a command is retried while Redis is unreachable
    """

    def __init__(self, url: str, attempt_s: float, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._where = without_password(url)
        self._redis: Redis = Redis.from_url(
            url, **_options(url, attempt_s), retry=Retry(NoBackoff(), 0)
        )

    def close(self) -> None:
        self._redis.close()

    def call(self, *command: Any) -> Any:
        """Raises `ServiceUnavailable` once the deadline has passed."""
        deadline = Deadline(self.deadline_s)
        while True:
            try:
                return self.attempt(*command)
            except FAILURES as error:
                self.pause(deadline, error)

    def attempt(self, *command: Any) -> Any:
        """Try once. Raises one of `FAILURES`."""
        try:
            # redis-py leaves this method without types
            return self._redis.execute_command(*command)  # type: ignore[no-untyped-call]
        except ReadOnlyError:
            # See `AsyncRedisConnection.attempt`.
            self._redis.connection_pool.disconnect(inuse_connections=False)
            raise

    def pause(self, deadline: Deadline, error: Exception) -> None:
        """Sleep between two attempts. Raises `ServiceUnavailable` once the deadline has passed."""
        if deadline.has_passed:
            raise ServiceUnavailable(
                f"Redis at {self._where} was not usable for {deadline.seconds:g} s "
                f"({str(error) or type(error).__name__}); check that Redis runs, and that "
                "trainer and inference server have the same --redis-url"
            ) from error
        time.sleep(RETRY_S)


class AsyncRedisConnection(ClosesOnAsyncExit):
    """The same for coroutines. `attempt_s`: limit on one attempt."""

    def __init__(self, url: str, attempt_s: float) -> None:
        self._where = without_password(url)
        self._attempt_s = attempt_s
        self._is_away = False
        self._redis: AsyncRedis = AsyncRedis.from_url(
            url, **_options(url, attempt_s), retry=AsyncRetry(NoBackoff(), 0)
        )

    async def close(self) -> None:
        await self._redis.aclose()

    async def call(self, *command: Any) -> Any:
        """Retry until Redis answers, without a deadline."""
        while True:
            try:
                answer = await self.attempt(*command)
            except FAILURES as error:
                self.note_absence(error)
                await asyncio.sleep(ASYNC_RETRY_S)
            else:
                if self._is_away:
                    self._is_away = False
                    log.info("redis.reconnected", redis=self._where)
                return answer

    async def attempt(self, *command: Any, within_s: float | None = None) -> Any:
        """Try once. Raises one of `FAILURES`.

        After a failover, open connections still lead to the former primary, which is a replica now.
        They are closed, so that the next attempt finds the new primary.
        """
        async with asyncio.timeout(within_s or self._attempt_s):
            try:
                # redis-py leaves this method without types
                return await self._redis.execute_command(*command)  # type: ignore[no-untyped-call]
            except ReadOnlyError:
                await self._redis.connection_pool.disconnect(inuse_connections=False)
                raise

    def note_absence(self, error: BaseException) -> None:
        """Log the first failure since Redis last answered."""
        if not self._is_away:
            self._is_away = True
            reason = str(error) or type(error).__name__
            log.warning(
                "redis.unreachable",
                redis=self._where,
                reason=reason,
                hint="start Redis, or check --redis-url",
            )


def _options(url: str, attempt_s: float) -> dict[str, Any]:
    return client_options(url) | {
        "socket_connect_timeout": attempt_s,
        "socket_timeout": attempt_s,
        "protocol": 2,
        "decode_responses": True,
        "encoding_errors": "replace",  # bytes that are not UTF-8 must not raise here
    }


def client_options(url: str) -> dict[str, Any]:
    """Arguments of redis-py for the clients of all services."""
    parts, local = urlsplit(url), urlsplit(LOCAL_REDIS)
    # redis-py turns keep-alive probes on by itself, and refuses them for a Unix socket.
    options: dict[str, Any] = (
        {} if parts.scheme == "unix" else {"socket_keepalive_options": TCP_OPTIONS}
    )
    if parts.scheme == "redis" and parts.netloc in (local.netloc, local.hostname):
        options["credential_provider"] = _OwnPassword()
    return options


class _OwnPassword(CredentialProvider):
    """The password of the local Redis, for each new connection to it. Whoever else listens on its
    port does not get the password."""

    def get_credentials(self) -> tuple[str, str] | tuple[()]:  # type: ignore[override]
        port = urlsplit(LOCAL_REDIS).port
        assert port is not None
        password = known_password(local_redis_directory()) if is_own_listener(port) else None
        # Because of the user's name, a Redis that has no password accepts it.
        return () if password is None else ("default", password)

    async def get_credentials_async(self) -> tuple[str, str] | tuple[()]:  # type: ignore[override]
        return self.get_credentials()
