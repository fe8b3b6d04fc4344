"""Reads from /proc how much of the shared memory each process holds (proc_pid_smaps(5))."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

from grpo_vllm.weights.memory import MEMFD_NAME


@dataclass(frozen=True)
class WeightMapping:
    """One process's mapping of the arena, sizes in bytes."""

    inode: int
    resident_bytes: int
    proportional_bytes: int
    private_bytes: int


def weight_mappings() -> tuple[WeightMapping, WeightMapping]:
    """The mappings of the server's engine, and those of this process."""
    ours = _mappings(os.getpid())
    assert len(ours) == 1, f"expected one mapping in the trainer, found {ours}"
    served = [
        mapping
        for pid in psutil.pids()
        if pid != os.getpid()
        for mapping in _mappings(pid)
        if mapping.inode == ours[0].inode
    ]
    assert len(served) == 1, f"expected one mapping in the server, found {served}"
    return served[0], ours[0]


def holds_weights(pid: int) -> bool:
    return bool(_mappings(pid))


def _mappings(pid: int) -> list[WeightMapping]:
    try:
        smaps = Path(f"/proc/{pid}/smaps").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # ended, or of another user
        return []
    entries = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", smaps)
    return [_parse(entry) for entry in entries if f"/memfd:{MEMFD_NAME}" in entry]


def _parse(entry: str) -> WeightMapping:
    inode = int(entry.splitlines()[0].split()[4])
    kilobytes = {k: int(v) for k, v in re.findall(r"(?m)^(\w+):\s+(\d+) kB$", entry)}
    return WeightMapping(
        inode=inode,
        resident_bytes=kilobytes["Rss"] * 1024,
        proportional_bytes=kilobytes["Pss"] * 1024,
        private_bytes=(kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]) * 1024,
    )
