"""A Redis that run-api and grpo-run start if nothing listens on its port."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from structlog.testing import capture_logs

from grpo_core.redis import server
from grpo_core.redis.server import LocalRedis
from grpo_core.redis.url import redis_password
from grpo_local.process.ports import free_port
from tests.support.redis_server import start_redis
from tests.support.wait import wait_for


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
    theirs = start_redis(port, tmp_path / "theirs", server.bundled_redis())
    with LocalRedis(tmp_path / "unwritable" / "ours", port) as ours:
        assert not ours.is_ours
        assert not (tmp_path / "unwritable").exists()
    assert listens(port)
    theirs.stop()
