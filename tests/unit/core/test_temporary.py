"""Temporary directories: the next process removes those of a killed one, and no other."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from grpo_core.temporary import temporary_directory

HOLD = """
from grpo_core.temporary import temporary_directory
with temporary_directory() as path:
    (path / "weights.sock").touch()
    print(path, flush=True)
    input()
"""


def test_the_directory_of_a_killed_process_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "grpo-of-a-user").mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    with holder:
        held = Path(holder.stdout.readline().strip())
        with temporary_directory() as own:
            assert {*tmp_path.iterdir()} == {held, own, tmp_path / "grpo-of-a-user"}
        holder.kill()
    assert held.exists()
    subprocess.run([sys.executable, "-c", HOLD], input=b"\n", stdout=subprocess.DEVNULL, check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["grpo-of-a-user"]
