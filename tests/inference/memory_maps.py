"""Reads from /proc how much of the shared memory each process holds (proc_pid_smaps(5))."""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil

from grpo_vllm.weights.memory import MEMFD_NAME
from tests.fixtures.inference import ON_GPU

WeightMapping = dict[str, int]
"""One process's mapping of the arena: `inode`, and sizes in bytes under their names in smaps: `Rss`
(resident), `Pss` (proportional), `Private_Clean`, …"""


def weight_mappings() -> tuple[WeightMapping, WeightMapping]:
    """The mappings of the server's engine, and those of this process."""
    (ours,) = _mappings(os.getpid())
    others = (pid for pid in psutil.pids() if pid != os.getpid())
    (served,) = (m for pid in others for m in _mappings(pid) if m["inode"] == ours["inode"])
    return served, ours


def holds_weights(pid: int) -> bool:
    """On a GPU: whether the process has opened the device, as only vLLM's worker does."""
    if ON_GPU:
        links = (Path(os.readlink(link)) for link in Path(f"/proc/{pid}/fd").iterdir())
        return any(link.name == "nvidia-uvm" for link in links)
    return bool(_mappings(pid))


def _mappings(pid: int) -> list[WeightMapping]:
    try:
        smaps = Path(f"/proc/{pid}/smaps").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # ended, or of another user
        return []
    entries = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", smaps)
    return [
        {
            "inode": int(entry.splitlines()[0].split()[4]),
            **{k: int(v) * 1024 for k, v in re.findall(r"(?m)^(\w+):\s+(\d+) kB$", entry)},
        }
        for entry in entries
        if f"/memfd:{MEMFD_NAME}" in entry
    ]
