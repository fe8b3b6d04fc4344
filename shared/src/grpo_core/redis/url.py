"""Validates Redis URLs, and hides their password in logs, errors and `repr`."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, SecretStr

_SCHEMES = ("redis", "rediss", "unix")


def _names_a_redis(value: SecretStr | None) -> SecretStr | None:
    if value is not None and not _is_usable(value.get_secret_value()):
        raise ValueError(
            "expected redis://host:port/db, rediss://... or unix://...; percent-encode special "
            "characters such as / # ? @ in the password"
        )
    return value


def _is_usable(url: str) -> bool:
    # urllib's errors contain parts of the URL, so they are not raised further
    try:
        parts = urlsplit(url)
        return parts.scheme in _SCHEMES and parts.port != 0
    except ValueError:
        return False


def without_password(url: str) -> str:
    """The URL for messages, always with a port."""
    parts = urlsplit(url)
    host = f"{parts.hostname}:{parts.port or 6379}" if parts.hostname else ""
    return f"{parts.scheme}://{host}{parts.path}"


RedisUrl = Annotated[SecretStr, AfterValidator(_names_a_redis)]
OptionalRedisUrl = Annotated[SecretStr | None, AfterValidator(_names_a_redis)]
