"""The summary of a run."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest
from redis import Redis

from grpo_core.handoff import ServerStatus, SupervisorState, status_key
from grpo_trainer.benchmark import FILE_NAME, Stopwatch, server_status
from grpo_trainer.settings import TrainerSettings

SERVER = ServerStatus(
    state=SupervisorState.SERVING,
    epoch=1,
    step=3,
    restarts=2,
    dropped_requests=0,
    generation_tokens=99,
)


def record(time_s: float, sync_s: float, **others: float) -> dict[str, float]:
    times = {"step_time": 2.0, "sync_time": sync_s, "data_fetch_time": 0.5, "compute_time": 1.0}
    return {f"train/{name}": value for name, value in times.items()} | {"time_s": time_s} | others


def test_every_number_in_the_file_by_hand(tmp_path: Path) -> None:
    watch = Stopwatch()
    watch.add(record(2.0, 0.0, **{"reward/mean": 0.25}), is_served=False)
    watch.add(record(63.0, 24.0, **{"reward/mean": 0.75}), is_served=True)
    summary = watch.summary("none", SERVER)
    summary.write(tmp_path)
    written = json.loads((tmp_path / FILE_NAME).read_text())
    assert written.pop("peak_rss_bytes") > 10_000_000
    assert written == {
        **{"mode": "none", "steps": 2, "total_s": 63.0, "step_s_mean": 2.0},
        **{"sync_s_total": 24.0, "sync_s_mean": 24.0, "publishes": 1},
        **{"fetch_s_total": 1.0, "compute_s_total": 2.0, "peak_cuda_bytes": None},
        **{"restarts": 2, "dropped_requests": 0, "generation_tokens": 99},
        **{"reward_first": 0.25, "reward_last": 0.75},
    }
    assert "BENCHMARK SUMMARY (none)" in str(summary)


def test_the_server_status_is_read_from_a_redis_that_answers(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_trainer.benchmark.STATUS_DEADLINE_S", 60.0)
    run_id = uuid.uuid4().hex[:8]
    fields = {"model_name": "m", "weight_bridge_mode": "shared_vllm", "run_id": run_id}
    assert server_status(TrainerSettings(**fields)) is None
    with_redis = TrainerSettings(**fields, redis_url=redis_url)
    assert server_status(with_redis) is None
    with Redis.from_url(redis_url) as redis:
        redis.hset(status_key(run_id), mapping=SERVER.on_the_wire())  # type: ignore[arg-type]
    assert server_status(with_redis) == SERVER

    monkeypatch.setattr("grpo_trainer.benchmark.STATUS_DEADLINE_S", 0.2)
    nobody = TrainerSettings(**fields, redis_url="redis://127.0.0.1:1/0")
    assert server_status(nobody) is None
