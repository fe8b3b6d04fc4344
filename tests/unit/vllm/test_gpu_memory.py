"""When the memory of an engine that has ended counts as free, with a stand-in for nvidia-smi."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from grpo_vllm.supervisor.memory import SETTLED_S, GpuMemory, gpu_memory, memory_is_back

STAND_IN = """#!/bin/sh
cd "${0%/*}"
head -n 1 told | tr ' ' '\\n'
[ "$(sed -n '$=' told)" = 1 ] || sed -i 1d told
"""


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a line per answer, MiB in use on each GPU; the last one is repeated."""
    command = tmp_path / "nvidia-smi"
    command.write_text(STAND_IN)
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "told"


def test_every_gpu_is_read(told: Path) -> None:
    told.write_text("300 7000")
    assert gpu_memory() == GpuMemory((300, 7000))


async def test_without_a_gpu_there_is_nothing_to_wait_for(told: Path) -> None:
    told.write_text("90000")
    assert await memory_is_back(GpuMemory())


async def test_memory_that_comes_back_is_waited_for(told: Path) -> None:
    told.write_text("300 60000\n300 60000\n300 9000\n300 700")
    assert await memory_is_back(GpuMemory((300, 400)))
    assert told.read_text() == "300 700"


async def test_a_trainer_on_the_same_gpu_does_not_hold_up_a_restart(told: Path) -> None:
    """It came after the first engine and stays."""
    told.write_text("60000\n20000")
    assert await memory_is_back(GpuMemory((300,)))
    assert SETTLED_S <= asyncio.get_running_loop().time() < 2 * SETTLED_S


async def test_memory_that_falls_without_end_is_said_so(told: Path) -> None:
    told.write_text("\n".join(str(90000 - 10 * i) for i in range(100)))
    assert not await memory_is_back(GpuMemory((300,)), deadline_s=2 * SETTLED_S)
