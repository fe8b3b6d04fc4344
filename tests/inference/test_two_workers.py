"""A server whose engine has two workers, each with a shard of the model (`full`)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.fixtures.adapters import load, make_adapter, make_checkpoint
from tests.fixtures.file_sync import HandedOffServer, serve_by_hand
from tests.fixtures.inference import FILE_MOVED, FILE_NOISE, START_DEADLINE_S, loads_in_place
from tests.support.process_table import is_alive

pytestmark = pytest.mark.full

TWO_WORKERS = ("--tensor-parallel-size", "2")
PROMPT = [5, 6, 7]


def engine_of(served: HandedOffServer) -> psutil.Process:
    return psutil.Process(served.server.status()["engine_pid"])


def processes_below(engine: psutil.Process) -> list[int]:
    return [process.pid for process in engine.children(recursive=True)]


def shared_memory_of(pids: list[int]) -> set[Path]:
    maps = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {
        Path("/dev/shm", line.partition("/dev/shm/")[2]) for line in maps if "/dev/shm/" in line
    }


def kill_a_worker(served: HandedOffServer) -> None:
    """Returns once a new engine serves."""
    engine, crashes = engine_of(served), served.server.status()["crashes"]
    before = [engine.pid, *processes_below(engine)]
    memory = shared_memory_of(before)
    assert memory
    os.kill(before[-1], signal.SIGKILL)  # the youngest: a worker
    served.server.process.wait_until(
        lambda: (
            served.server.status()["crashes"] > crashes
            and served.server.status()["state"] == "serving"
        ),
        START_DEADLINE_S,
    )
    assert not any(map(is_alive, before))
    assert not any(path.exists() for path in memory)


def test_models(tiny_model: Path, redis_url: str, tmp_path: Path) -> None:
    models = [make_checkpoint(tiny_model, tmp_path / "weights" / f"step-{i}", i) for i in range(2)]
    with serve_by_hand(tiny_model, redis_url, tmp_path, models, *TWO_WORKERS) as served:
        engine = engine_of(served)
        for number, model in enumerate(models):
            served.publish(model)
            assert served.difference(load(tiny_model, model), PROMPT) < FILE_NOISE
            assert served.difference(load(tiny_model, models[number - 1]), PROMPT) > FILE_MOVED
        assert (engine_of(served) == engine) is loads_in_place()
        kill_a_worker(served)
        assert served.difference(load(tiny_model, models[-1]), PROMPT) < FILE_NOISE


def test_adapters(tiny_model: Path, redis_url: str, tmp_path: Path) -> None:
    adapters = [make_adapter(tiny_model, tmp_path / "weights" / f"step-{i}", i) for i in range(3)]
    flags = ("--enable-lora", *TWO_WORKERS)
    with serve_by_hand(tiny_model, redis_url, tmp_path, adapters, *flags) as served:
        for restarts, adapter in zip((False, False, True), adapters, strict=True):
            engine = engine_of(served)
            before = processes_below(engine)
            memory = shared_memory_of(before)
            served.publish(adapter, restarts)
            assert served.difference(load(tiny_model, adapter), PROMPT) < FILE_NOISE
            assert (engine_of(served) == engine) is not restarts
        assert not any(map(is_alive, before))
        assert not any(path.exists() for path in memory)
        kill_a_worker(served)
        assert served.difference(load(tiny_model, adapters[-1]), PROMPT) < FILE_NOISE
