"""The password of a Redis that this project starts, so other users of the host cannot use it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

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
    _make(directory / _FILE)
    return (directory / _FILE).read_text()


def _make(path: Path) -> None:
    """Never an incomplete file, and never a second password."""
    new = path.with_name(f"{_FILE}.{os.getpid()}")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(32))
    try:
        os.link(new, path)
    except FileExistsError:
        pass
    finally:
        new.unlink()
