"""Finds out whether this CPU has instructions for bfloat16."""

from __future__ import annotations

import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
INSTRUCTIONS = {"avx512_bf16", "amx_bf16"}
SLOW = (
    "this CPU has no instructions for bfloat16, so it computes bfloat16 several times as slowly as "
    "float32"
)


def is_slow_in_bfloat16() -> bool:
    """Whether this is an x86 CPU without such instructions. Others were not measured."""
    if platform.machine() != "x86_64" or not CPUINFO.exists():
        return False
    fields = (line.partition(":") for line in CPUINFO.read_text().splitlines())
    flags = next((value for name, _, value in fields if name.strip() == "flags"), "")
    return not INSTRUCTIONS & set(flags.split())
