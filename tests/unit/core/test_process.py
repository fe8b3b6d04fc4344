"""What child processes get of this one's environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from grpo_core import cpu
from grpo_core.cpu import SPIN_COUNT, WAIT_POLICY, is_faster_with_onednn, prepare_cpu
from grpo_core.process import ManagedProcess

DEADLINE_S = 60.0
NAME, OURS = SPIN_COUNT
CACHE = "LRU_CACHE_CAPACITY"


def test_a_child_is_no_rank_of_torchrun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A server with these variables waits for torchrun's store, and ends."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KEPT", "1")
    names = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE", "KEPT", "ADDED"]
    code = f"import os; print([name for name in {names} if name in os.environ])"
    log = tmp_path / "log"
    child = ManagedProcess("child", [sys.executable, "-c", code], log, {"ADDED": "1"})
    assert child.wait(DEADLINE_S) == 0
    child.stop(DEADLINE_S)  # collects its status
    assert log.read_text().strip() == "['KEPT', 'ADDED']"


@pytest.mark.parametrize(
    ("given", "name", "expected"),
    [
        ({}, NAME, OURS),
        ({NAME: "infinity"}, NAME, "infinity"),
        ({WAIT_POLICY: "PASSIVE"}, NAME, None),
        ({}, CACHE, "64"),
        ({CACHE: "1024"}, CACHE, "1024"),
    ],
)
def test_what_the_user_has_set_wins(
    given: dict[str, str], name: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    prepare_cpu()
    assert os.environ.get(name) == expected


@pytest.mark.parametrize(
    ("vendor", "flags", "is_faster"),
    [
        ("AuthenticAMD", "fpu avx512f", True),
        ("AuthenticAMD", "fpu avx2", False),
        ("GenuineIntel", "fpu avx512f", False),
    ],
)
def test_onednn_multiplies_where_mkl_does_not_use_the_cpu(
    vendor: str, flags: str, is_faster: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"vendor_id\t: {vendor}\nflags\t\t: {flags}\n")
    monkeypatch.setattr(cpu, "CPUINFO", cpuinfo)
    assert is_faster_with_onednn() == is_faster
