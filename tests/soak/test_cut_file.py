"""Redis starts on a file that a kill cut in the middle of a script, without half of the script."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import redis

from grpo_local.ports import free_port
from grpo_local.redis_server import bundled_redis, start_redis

SETS_BOTH = "redis.call('SET', 'a', ARGV[1]) return redis.call('SET', 'b', ARGV[1])"


@pytest.mark.full
@pytest.mark.parametrize("bytes_cut", [1, 40])
def test_a_script_that_is_half_written_is_dropped_whole(tmp_path: Path, bytes_cut: int) -> None:
    port, file = free_port(), tmp_path / "appendonly.aof"
    with redis.Redis(port=port, decode_responses=True) as client:
        server = start_redis(port, tmp_path, bundled_redis())
        try:
            client.config_set("appendfsync", "always")  # everything is in the file at any moment
            for value in "12":
                client.eval(SETS_BOTH, 0, value)
            server.kill()
            os.truncate(file, file.stat().st_size - bytes_cut)
            server = start_redis(port, tmp_path, bundled_redis())
            assert client.mget("a", "b") == ["1", "1"]
        finally:
            server.kill()
