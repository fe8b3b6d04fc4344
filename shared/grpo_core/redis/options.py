"""Arguments of redis-py for the clients of all services."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from redis.credentials import CredentialProvider

from grpo_core.listening import is_own_listener
from grpo_core.redis.url import LOCAL_REDIS, known_password, local_redis_directory
from grpo_core.sockets import redis_options


def client_options(url: str) -> dict[str, Any]:
    parts, local = urlsplit(url), urlsplit(LOCAL_REDIS)
    options = redis_options(url)
    if parts.scheme == "redis" and parts.netloc in (local.netloc, local.hostname):
        options["credential_provider"] = _OwnPassword(local.port)
    return options


class _OwnPassword(CredentialProvider):
    """The password of the local Redis, for each new connection to it. Whoever else listens on its
    port does not get the password."""

    def __init__(self, port: int | None) -> None:
        self._port = port

    def get_credentials(self) -> tuple[str, str] | tuple[()]:  # type: ignore[override]
        assert self._port is not None
        password = known_password(local_redis_directory()) if is_own_listener(self._port) else None
        # Because of the user's name, a Redis that has no password accepts it.
        return () if password is None else ("default", password)

    async def get_credentials_async(self) -> tuple[str, str] | tuple[()]:  # type: ignore[override]
        return self.get_credentials()
