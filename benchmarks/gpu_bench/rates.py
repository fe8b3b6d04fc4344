"""What the device does at most, measured in the same run as what is held against it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

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
