"""Redis starts on a file that was cut in the middle of a command, without half of a script."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import redis

from grpo_local.ports import free_port
from grpo_local.processes import ManagedProcess
from grpo_local.redis_server import bundled_redis, start_redis
from tests.soak.redis_facts import aof_state, aof_tails_cut
from tests.support.process_table import eventually

SETS_BOTH = "redis.call('SET', 'a', ARGV[1]) return redis.call('SET', 'b', ARGV[1])"


def kill_and_cut(server: ManagedProcess, file: Path, bytes_cut: int) -> None:
    server.kill()
    os.truncate(file, file.stat().st_size - bytes_cut)


@pytest.mark.parametrize("bytes_cut", [1, 40])
def test_a_cut_tail(tmp_path: Path, bytes_cut: int) -> None:
    port = free_port()
    file, log = tmp_path / "appendonly.aof", tmp_path / "redis.log"
    with redis.Redis(port=port, decode_responses=True) as client:
        server = start_redis(port, tmp_path, bundled_redis())
        try:
            client.config_set("appendfsync", "always")  # whose file has all at any moment
            for value in "12":
                client.eval(SETS_BOTH, 0, value)
            assert aof_tails_cut(log.read_text()) == 0
            kill_and_cut(server, file, bytes_cut)
            server = start_redis(port, tmp_path, bundled_redis())
            assert client.mget("a", "b") == ["1", "1"]
            assert aof_tails_cut(log.read_text()) == 1
            assert eventually(lambda: aof_state(port) is not None)
        finally:
            server.kill()
    assert aof_state(port) is None
