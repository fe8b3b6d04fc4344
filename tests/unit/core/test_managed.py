"""The child processes that commands start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from grpo_core.process import ManagedProcess

DEADLINE_S = 60.0


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
