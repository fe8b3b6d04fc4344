from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_core import host_place

ASK = "from grpo_core import host_place; print(host_place.pid_namespace())"


def in_another_process(*prefix: str) -> int:
    command = [*prefix, sys.executable, "-c", ASK]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_only_processes_of_one_namespace_agree() -> None:
    assert in_another_process() == host_place.pid_namespace()
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-p", "-f", "true"], check=False).returncode:
        pytest.skip("needs the right to make a PID namespace")
    assert in_another_process(unshare, "-p", "-f") != host_place.pid_namespace()


def test_shared_memory_is_the_file_system_there_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_place.shm_filesystem() == Path("/dev/shm").stat().st_dev
    monkeypatch.setattr(host_place, "_SHM", Path("/nothing"))
    assert host_place.shm_filesystem() == 0
