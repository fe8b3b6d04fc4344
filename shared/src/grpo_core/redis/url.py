"""The URL of a Redis, which may hold a password: no log, error or `repr` shows it."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, SecretStr

_SCHEMES = ("redis", "rediss", "unix")


def _names_a_redis(value: SecretStr | None) -> SecretStr | None:
    if value is not None and not _is_usable(value.get_secret_value()):
        raise ValueError(
            "expected redis://host:port/db, rediss://... or unix://..., with what is special in a "
            "URL, such as / # ? and @, percent-encoded in the password"
        )
    return value


def _is_usable(url: str) -> bool:
    # urllib's errors repeat parts of the URL
    try:
        parts = urlsplit(url)
        return parts.scheme in _SCHEMES and parts.port != 0
    except ValueError:
        return False


def without_password(url: str) -> str:
    """For messages. The port that Redis has by default is named."""
    parts = urlsplit(url)
    host = f"{parts.hostname}:{parts.port or 6379}" if parts.hostname else ""
    return f"{parts.scheme}://{host}{parts.path}"


RedisUrl = Annotated[SecretStr, AfterValidator(_names_a_redis)]
OptionalRedisUrl = Annotated[SecretStr | None, AfterValidator(_names_a_redis)]
