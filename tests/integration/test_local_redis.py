"""A Redis that run-api and grpo-run start if nothing listens on its port."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from structlog.testing import capture_logs

from grpo_core.process import ManagedProcess
from grpo_core.redis import connection as connections
from grpo_core.redis import server
from grpo_core.redis.connection import RedisConnection
from grpo_core.redis.server import (
    LocalRedis,
    RedisNotStarted,
    answers_ping,
    bundled_redis,
    redis_command,
)
from grpo_core.redis.url import redis_password, with_password
from grpo_runs.process.ports import free_port
from tests.support.redis_server import start_redis
from tests.support.wait import DEADLINE_S, wait_for


@pytest.fixture(autouse=True)
def watches_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_WATCH_S", 0.02)


def listens(port: int) -> bool:
    return server._listens(port)


def client(port: int, directory: Path) -> redis.Redis:
    return redis.Redis(port=port, password=redis_password(directory), decode_responses=True)


def test_data_lasts_from_one_start_to_the_next(tmp_path: Path) -> None:
    port = free_port()
    with capture_logs() as logs, LocalRedis(tmp_path, port), client(port, tmp_path) as connection:
        connection.set("key", "kept")
    assert logs == [
        {"event": "redis.started", "log_level": "info", "port": port, "directory": str(tmp_path)}
    ]
    assert not listens(port)
    with LocalRedis(tmp_path, port), client(port, tmp_path) as connection:
        assert connection.get("key") == "kept"


def test_another_process_starts_it_again_when_its_owner_ends(tmp_path: Path) -> None:
    port = free_port()
    owner = LocalRedis(tmp_path, port)
    with LocalRedis(tmp_path, port), client(port, tmp_path) as connection:
        connection.set("key", "kept")
        owner.close()
        wait_for(lambda: listens(port))
        assert connection.get("key") == "kept"
    assert not listens(port)


def test_somebody_elses_redis_is_used_and_never_replaced(tmp_path: Path) -> None:
    port = free_port()
    theirs = start_redis(port, tmp_path / "theirs")
    with LocalRedis(tmp_path / "unwritable" / "ours", port) as ours:
        assert not ours.is_ours
        assert not (tmp_path / "unwritable").exists()
    assert listens(port)
    theirs.stop()


ATTACK = """
import encodings.idna, os, pathlib, socket, sys
os.setgroups([]), os.setgid(65534), os.setuid(65534)
port, directory = int(sys.argv[1]), pathlib.Path(sys.argv[2])
with socket.create_connection(("127.0.0.1", port)) as connection:
    for command in (b"PING", b"FLUSHALL", b"CONFIG SET dir /", b"AUTH guess"):
        connection.sendall(command + b"\\r\\n")
        print(connection.recv(100).decode().split()[0])
for name in ("password", "redis.conf", "appendonly.aof"):
    try:
        (directory / name).read_bytes()
    except PermissionError:
        print("no access")
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory that every user may enter, unlike pytest's."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name) / "redis"


def test_another_user_can_neither_use_it_nor_read_its_files(directory: Path) -> None:
    if os.getuid():
        pytest.skip("not root, who alone can start a process of another user")
    port = free_port()
    with LocalRedis(directory, port):
        command = [sys.executable, "-c", ATTACK, str(port), str(directory)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        refused = ["-NOAUTH", "-NOAUTH", "-ERR", "-WRONGPASS"]
        assert done.stdout.split("\n") == [*refused, *["no access"] * 3, ""]


def test_a_redis_of_another_user_is_named(directory: Path, tmp_path: Path) -> None:
    port = free_port()
    with (
        LocalRedis(directory, port),
        pytest.raises(RedisNotStarted, match="with a password"),
    ):
        LocalRedis(tmp_path / "mine", port)


SQUATTER = """
import os, socketserver, sys
os.setuid(65534)
class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            print(line, flush=True)
            if line.startswith(b"*"):
                self.wfile.write(b"+PONG\\r\\n")
server = socketserver.ThreadingTCPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print("listens", flush=True)
server.serve_forever()
"""


def test_another_user_who_takes_the_port_first_does_not_get_the_password(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.getuid():
        pytest.skip("not root, who alone can start a process of another user")
    port = free_port()
    monkeypatch.setattr(connections, "LOCAL_REDIS", f"redis://127.0.0.1:{port}/0")
    monkeypatch.setattr(connections, "local_redis_directory", lambda: directory)
    url, password = f"redis://127.0.0.1:{port}", redis_password(directory)
    with LocalRedis(directory, port), RedisConnection(url, DEADLINE_S, 0.0) as connection:
        assert connection.call("PING")
    command = [sys.executable, "-c", SQUATTER, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as squatter:
        try:
            assert squatter.stdout is not None
            assert squatter.stdout.readline() == "listens\n"
            LocalRedis(directory, port).close()
            assert not server.answers_ping(port, password)
            with RedisConnection(url, DEADLINE_S, 0.0) as connection:
                connection.call("PING")
        finally:
            squatter.kill()
        received = squatter.stdout.read()
    assert "PING" in received
    assert password not in received


def test_the_password_suits_a_redis_without_one(redis_url: str, directory: Path) -> None:
    url = with_password(redis_url, redis_password(directory))
    with redis.Redis.from_url(url) as client:
        assert client.ping()


def test_the_redis_of_a_killed_owner_is_waited_for(tmp_path: Path) -> None:
    """It ends with its owner, but needs a moment."""
    port, password = free_port(), redis_password(tmp_path)
    command = redis_command(port, tmp_path, bundled_redis(), password=password)
    orphan = ManagedProcess("redis", command, tmp_path / "orphan.log")
    orphan.wait_until(lambda: answers_ping(port, password), DEADLINE_S)

    class Waiting(LocalRedis):
        def _is_open(self, wait: bool) -> bool:
            is_open = super()._is_open(wait)
            orphan.stop()
            return is_open

    with Waiting(tmp_path, port) as ours, client(port, tmp_path) as connection:
        assert ours.is_ours
        assert connection.ping()
