"""Real processes that hold a known amount of memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_local.memory import MIB, MemoryPeaks, tree_bytes
from tests.support.wait import wait_for

HELD = 64 * MIB
HOLD = f"""
import pathlib, subprocess, sys, time
held = b"x" * {HELD}
ready, *child = sys.argv[1:]
pathlib.Path(ready).touch()
if child:
    subprocess.run([sys.executable, "-c", *child])
time.sleep(120)
"""


@pytest.fixture
def family(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process and its child, each of which holds 64 MiB."""
    ready = [tmp_path / "parent", tmp_path / "child"]
    command = [sys.executable, "-c", HOLD, ready[0], HOLD, ready[1]]
    parent = subprocess.Popen(command, start_new_session=True)
    try:
        wait_for(lambda: all(path.exists() for path in ready))
        yield parent
    finally:
        end(parent)


def end(parent: subprocess.Popen[bytes]) -> None:
    if parent.poll() is None:
        os.killpg(parent.pid, 9)
        parent.wait()


def test_the_peak_is_that_of_the_whole_family_and_stays(family: subprocess.Popen[bytes]) -> None:
    peaks = MemoryPeaks(every_s=0.0)
    peaks.watch({"server": family.pid})
    seen = peaks.peak_bytes["server"]
    assert 2 * HELD < seen < 3 * HELD
    end(family)
    assert tree_bytes(family.pid) == 0
    peaks.watch({"server": family.pid})
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
