"""Real processes that hold a known amount of memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from grpo_local.memory import MIB, MemoryPeaks, tree_bytes
from tests.support.process_table import eventually

HELD = 64 * MIB
HOLD = f"import pathlib, sys, time; held = b'x' * {HELD}; pathlib.Path(sys.argv[1]).touch(); "
SLEEP = "time.sleep(120)"
FAMILY = (
    HOLD + "import subprocess; subprocess.run([sys.executable, '-c', sys.argv[3], sys.argv[2]])"
)


def test_memory_of_a_process_and_its_children_is_summed(tmp_path: Path) -> None:
    ready = [tmp_path / "parent", tmp_path / "child"]
    command = [sys.executable, "-c", FAMILY, *map(str, ready), HOLD + SLEEP]
    parent = subprocess.Popen(command, start_new_session=True)
    try:
        assert eventually(lambda: all(path.exists() for path in ready))
        assert 2 * HELD < tree_bytes(parent.pid) < 3 * HELD
    finally:
        os.killpg(parent.pid, 9)
        parent.wait()
    assert tree_bytes(parent.pid) == 0


def test_the_peak_stays_when_the_process_is_gone(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    child = subprocess.Popen([sys.executable, "-c", HOLD + SLEEP, str(ready)])
    peaks = MemoryPeaks(every_s=0.0)
    try:
        assert eventually(ready.exists)
        peaks.watch({"server": child.pid})
    finally:
        child.kill()
        child.wait()
    seen = peaks.peak_bytes["server"]
    assert HELD < seen < 2 * HELD
    peaks.watch({"server": child.pid})
    assert peaks.peak_bytes == {"server": seen}


def test_a_service_is_measured_when_the_next_one_joins() -> None:
    peaks = MemoryPeaks(every_s=3600.0)
    me = os.getpid()
    peaks.watch({"server": me})
    early = peaks.peak_bytes["server"]
    held = b"x" * HELD
    peaks.watch({"server": me})
    assert peaks.peak_bytes == {"server": early}, "no sample before it is time"
    peaks.watch({"server": me, "trainer": me})
    assert peaks.peak_bytes["server"] > early + len(held) / 2
    assert peaks.peak_bytes["trainer"] > 0
