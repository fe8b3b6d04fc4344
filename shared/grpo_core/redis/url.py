"""Validates Redis URLs, hides their password in messages, and keeps that of a local Redis.

A Redis that this project starts has a password, so that other users of the host cannot use it.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, SecretStr

from grpo_core.settings.machine import state_directory

_FILE = "password"


def known_password(directory: Path) -> str | None:
    """None if none was made."""
    path = directory / _FILE
    return path.read_text() if path.exists() else None


def redis_password(directory: Path) -> str:
    """The password in a directory of Redis; made if there is none. Only its owner may enter the
    directory: its append-only file holds the run.

    Raises:
        OSError: it can be neither read nor made.
    """
    known = known_password(directory)
    if known is not None:
        return known
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    # Never an incomplete file, and never a second password.
    path, new = directory / _FILE, directory / f"{_FILE}.{os.getpid()}"
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(32))
    try:
        os.link(new, path)
    except FileExistsError:
        pass
    finally:
        new.unlink()
    return path.read_text()


LOCAL_REDIS = "redis://127.0.0.1:6379/0"
"""The default of every command. Clients add the password of a Redis that a command of this user
starts (`grpo_core.redis.connection`)."""
WITHOUT_REDIS = "none"
_SCHEMES = ("redis", "rediss", "unix")


def local_redis_directory() -> Path:
    """Of the Redis that listens at `LOCAL_REDIS`, if a command of this user starts it."""
    return state_directory() / "redis"


def local_redis() -> SecretStr:
    return SecretStr(LOCAL_REDIS)


def with_password(url: str, password: str) -> str:
    """Add the password to a URL without one. Because of the user's name, a Redis that has no
    password accepts it."""
    return url.replace("://", f"://default:{password}@", 1)


def _names_a_redis(value: SecretStr) -> SecretStr:
    try:
        parts = urlsplit(value.get_secret_value())
        is_usable = parts.scheme in _SCHEMES and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:  # not inside `except`: urllib's errors contain parts of the URL
        raise ValueError(
            "expected redis://host:port/db, rediss://... or unix://...; percent-encode special "
            "characters such as / # ? @ in the password"
        )
    return value


def _names_a_redis_or_none(value: SecretStr) -> SecretStr:
    return value if value.get_secret_value() == WITHOUT_REDIS else _names_a_redis(value)


def without_password(url: str) -> str:
    """The URL for messages, always with a port."""
    parts = urlsplit(url)
    host = f"{parts.hostname}:{parts.port or 6379}" if parts.hostname else ""
    return f"{parts.scheme}://{host}{parts.path}"


RedisUrl = Annotated[SecretStr, AfterValidator(_names_a_redis)]
OptionalRedisUrl = Annotated[SecretStr, AfterValidator(_names_a_redis_or_none)]
"""A URL, or `none` for a service that runs without Redis."""
