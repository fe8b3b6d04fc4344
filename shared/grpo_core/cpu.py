"""How processes share this machine's cores, and what its CPU computes slowly."""

from __future__ import annotations

import os
import platform
from pathlib import Path

SPIN_COUNT = ("GOMP_SPINCOUNT", "2000")
"""Number of times that a thread without work looks for some, before it sleeps.

By default a thread spins for milliseconds, on a core that another process could use: a trainer and
a server with two threads each on two cores then take several times as long for a step. A thread
that sleeps at once (OMP_WAIT_POLICY=PASSIVE) must be woken for each operation.
"""

WAIT_POLICY = "OMP_WAIT_POLICY"
"""OpenMP's own variable for the same."""


def share_cores() -> None:
    """Call this before torch is imported, because OpenMP reads the environment once. What the user
    has set wins."""
    if WAIT_POLICY not in os.environ:
        os.environ.setdefault(*SPIN_COUNT)


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
