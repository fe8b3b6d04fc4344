"""Room for the messages between worker processes, found out before anything is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_vllm.supervisor import shared_memory
from grpo_vllm.supervisor.shared_memory import (
    SharedMemoryTooSmall,
    require_shared_memory,
    worker_count,
)


@pytest.mark.parametrize(
    ("arguments", "workers"),
    [
        ("--dtype float32 --seed", 1),
        ("--tensor_parallel_size=4", 4),
        ("-tp 2 --pipeline-parallel-size 3", 6),
        ("--tensor-parallel-size two", 1),
    ],
)
def test_workers_are_counted(arguments: str, workers: int) -> None:
    assert worker_count(arguments.split()) == workers


def test_several_workers_need_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_shared_memory(["-tp", "2"], tmp_path)  # a disk has it
    monkeypatch.setattr(shared_memory, "BROADCAST_MIB", 10**12)
    with pytest.raises(SharedMemoryTooSmall, match=r"2 workers need \d+ MiB; .* set SHM_SIZE"):
        require_shared_memory(["-tp", "2"], tmp_path)
    require_shared_memory(["-tp", "1"], tmp_path)
    require_shared_memory(["-tp", "2"], tmp_path / "nowhere")
