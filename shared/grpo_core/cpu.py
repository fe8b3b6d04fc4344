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


SMALL_CACHES = {"LRU_CACHE_CAPACITY": "64", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
"""Shapes of matrix products for which torch and oneDNN keep compiled code.

By default they keep 1,024 each. Every micro-batch has another number of tokens: 1,200 numbers with
four shapes of weights took 2.5 GB, and take 0.1 GB so, in the same time.
"""


def prepare_cpu() -> None:
    """Call this before torch is imported: its libraries read the environment once. What the user
    has set wins."""
    if WAIT_POLICY not in os.environ:
        os.environ.setdefault(*SPIN_COUNT)
    for name, shapes in SMALL_CACHES.items():
        os.environ.setdefault(name, shapes)


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
    return not INSTRUCTIONS & _flags()


def is_faster_with_onednn() -> bool:
    """Whether oneDNN, a part of torch, multiplies float32 matrices faster than MKL, which torch
    uses for them: on an AMD EPYC with AVX-512 more than twice as fast. Others were not measured."""
    return CPUINFO.exists() and "AuthenticAMD" in CPUINFO.read_text() and "avx512f" in _flags()


def _flags() -> set[str]:
    fields = (line.partition(":") for line in CPUINFO.read_text().splitlines())
    return set(next((value for name, _, value in fields if name.strip() == "flags"), "").split())
