"""How processes share this machine's cores, and every choice that depends on its CPU: `CPU`."""

from __future__ import annotations

import ctypes
import math
import os
import platform
from dataclasses import dataclass
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


M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of mallopt(3), by glibc's malloc.h."""
LARGEST_KEPT = 128 * 2**20


def keep_freed_memory(largest: int) -> None:
    """Let malloc keep the memory that this process frees, for its next allocations.

    By default it gives large blocks back to the kernel, which fills each of their pages with zeros
    when it is used again. In a training step of SmolLM2-135M these were 0.6 to 1 GB and 15 % of the
    trainer's CPU time, and the highest amount of memory stayed the same. Larger blocks fit fewer
    freed gaps: with gradients of 195 MiB it doubled, to 2.8 GB.

    Does nothing without glibc, if the largest weight has more than `LARGEST_KEPT` bytes, or if the
    user has set malloc's own variables.

    Args: largest: bytes of the largest weight
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    is_chosen = any(name.startswith("MALLOC_") for name in os.environ)
    if mallopt is not None and largest <= LARGEST_KEPT and not is_chosen:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


CPUINFO = Path("/proc/cpuinfo")
QUOTA = Path("/sys/fs/cgroup/cpu.max")
BFLOAT16 = {"avx512_bf16", "amx_bf16"}
SLOW = (
    "this CPU has no instructions for bfloat16, so it computes bfloat16 several times as slowly as "
    "float32"
)
ISA_LIMIT = "ONEDNN_MAX_CPU_ISA"
"""oneDNN's own variable: the newest instructions that it may use, for example AVX512_CORE."""
PRODUCTS = "GRPO_FLOAT32_PRODUCTS"
"""onednn or mkl: the library that multiplies float32 matrices, for comparisons and tests."""


@dataclass(frozen=True)
class Cpu:
    """What depends on the CPU, apart from vLLM's choice of its own kernels.

    Args:
        cores: that this process may use
        is_slow_in_bfloat16: an x86 CPU without instructions for it. Others were not measured
        is_faster_with_onednn: oneDNN, a part of torch, multiplies float32 matrices faster than MKL,
            which torch uses for them: on an AMD EPYC with AVX-512 more than twice as fast, on an
            Intel Xeon with AVX-512 equally fast. Others were not measured
    """

    cores: int
    is_slow_in_bfloat16: bool
    is_faster_with_onednn: bool

    @classmethod
    def find(cls) -> Cpu:
        vendor, flags = _described()
        is_x86 = platform.machine() == "x86_64"
        by_onednn = vendor == "AuthenticAMD" and "avx512f" in flags
        if chosen := os.environ.get(PRODUCTS):
            if chosen not in ("onednn", "mkl"):
                raise ValueError(f"{PRODUCTS}={chosen}: choose onednn or mkl")
            by_onednn = chosen == "onednn"
        # Of the machine, less those that `taskset`, a batch system or a container takes away.
        cores = len(os.sched_getaffinity(0))
        quota, _, period = (QUOTA.read_text() if QUOTA.exists() else "max").partition(" ")
        if quota.isdecimal():
            cores = min(cores, math.ceil(int(quota) / int(period)))
        return cls(
            cores=cores,
            is_slow_in_bfloat16=is_x86 and bool(flags) and not flags & BFLOAT16,
            is_faster_with_onednn=by_onednn,
        )


def _described() -> tuple[str, set[str]]:
    """Vendor and flags of the first core, less the instructions that oneDNN may not use. Both are
    empty if the system does not describe the CPU."""
    found: dict[str, str] = {}
    if CPUINFO.exists():
        first, _, _ = CPUINFO.read_text().partition("\n\n")
        for line in first.splitlines():
            name, _, value = line.partition(":")
            found[name.strip()] = value.strip()
    flags = set(found.get("flags", "").split())
    limit = (os.environ.get(ISA_LIMIT) or "all").lower()
    if not any(word in limit for word in ("bf16", "fp16", "amx", "avx10", "all", "default")):
        flags -= BFLOAT16
    if not any(word in limit for word in ("avx512", "avx10", "all", "default")):
        flags -= {"avx512f"}
    return found.get("vendor_id", ""), flags


CPU = Cpu.find()
