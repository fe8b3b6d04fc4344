"""Reads from /proc how much of the weight memory each process holds (proc_pid_smaps(5))."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

from grpo_vllm.arena import MEMFD_NAME


@dataclass(frozen=True)
class WeightMapping:
    """One process's mapping of the arena, sizes in bytes."""

    inode: int
    resident_bytes: int
    proportional_bytes: int
    private_bytes: int


def weight_mappings(server_pid: int) -> tuple[WeightMapping, WeightMapping]:
    """(the server's, this process's). The server's is in one of its child processes."""
    server = psutil.Process(server_pid)
    candidates = [server, *server.children(recursive=True)]
    found = [m for process in candidates for m in _mappings(process.pid)]
    ours = [m for m in _mappings(os.getpid()) if found and m.inode == found[0].inode]
    assert len(found) == 1, f"expected one mapping in the server, found {found}"
    assert len(ours) == 1, f"expected one mapping in the trainer, found {ours}"
    return found[0], ours[0]


def _mappings(pid: int) -> list[WeightMapping]:
    smaps = Path(f"/proc/{pid}/smaps").read_text()
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
