"""The parts share this: the GPU and its rates, the servers, and the rows of the report."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import median

import torch
from torch.utils.benchmark import Timer

from benchmarks.gpu_bench.host import gpu, versions
from benchmarks.gpu_bench.models import (
    SHAPES,
    GpuWork,
    ModelShape,
    ShapeName,
    make_random_model,
)
from benchmarks.report import host_facts, number, replace_section, spread, table, verdict
from benchmarks.servers import LORA_FLAGS, Server, launch, our_server, stock_vllm
from grpo_core.closing import ClosesOnExit
from grpo_core.process import ManagedProcess
from grpo_core.redis.server import REDIS_DEADLINE_S, answers_ping, redis_command
from grpo_core.redis.url import WITHOUT_REDIS
from grpo_core.tree.weights import served_weights_directory
from grpo_runs.process.ports import free_port
from grpo_runs.services import redis_url
from grpo_trainer.telemetry.speed import product_rate

BANDWIDTH_H200 = 4.8e12
"""Bytes per second of an H200's memory, by its datasheet."""
COPY_BYTES = {"cuda": 4 * 2**30, "cpu": 2**27}
"""Far more than any cache holds."""
COPIED_S = 0.5
MS_PER_S, GIB = 1e3, 2**30
SERVED_NAME = "policy"


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
    about: lines above the table of each part
    directory: of logs, and of the files and sockets of the servers
    kept: of the model, and of vLLM's compiled code
    results: file that has a section for each part, written anew with each figure
    """

    size: ShapeName
    work: GpuWork
    device: torch.device
    rates: Rates
    about: Sequence[str]
    directory: Path
    kept: Path
    vllm_flags: Sequence[str] = ()
    results: Path | None = None
    rows: dict[str, list[str]] = field(default_factory=dict)
    """Of the table of the present part, by their first cell."""
    left_out: list[str] = field(default_factory=list)
    below: list[str] = field(default_factory=list)
    """Lines below that table, and those after them."""
    _heading: str = ""
    _servers: dict[ServerName, Server] = field(default_factory=dict)
    _redis: tuple[str, ManagedProcess] | None = None

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.on_gpu else torch.float32

    @property
    def shape(self) -> ModelShape:
        return SHAPES[self.size]

    @property
    def model(self) -> Path:
        """A checkpoint of random weights, written at the first use."""
        return make_random_model(self.size, self.kept / "models" / self.size, self.dtype)

    @property
    def redis_url(self) -> str:
        """Of a Redis that starts at the first use, for servers that load files."""
        if self._redis is None:
            port, directory = free_port(), self.directory / "redis"
            directory.mkdir()
            command, log = redis_command(port, directory), self.directory / "redis.log"
            self._redis = redis_url(port), ManagedProcess("redis", command, log)
            self._redis[1].wait_until(lambda: answers_ping(port), REDIS_DEADLINE_S)
        return self._redis[0]

    def launch(self, *names: ServerName) -> None:
        """Start these servers side by side, without waiting for them."""
        for name in names:
            if name not in self._servers:
                self._servers[name] = self._launched(name)

    def serve(self, *names: ServerName) -> list[Server]:
        """These servers, once all of them answer. Raises `ProcessFailed`."""
        self.launch(*names)
        for name in names:
            self._servers[name].wait()
        return [self._servers[name] for name in names]

    def stop_servers(self, keep: Sequence[ServerName] = ()) -> None:
        for name in [name for name in self._servers if name not in keep]:
            self._servers.pop(name).process.stop()

    def close(self) -> None:
        self.stop_servers()
        if self._redis:
            self._redis[1].stop()

    def files_of(self, name: ServerName) -> Path:
        """The trainer's --save-path for this server."""
        return self.directory / name.name.lower()

    def _launched(self, name: ServerName) -> Server:
        dtype = str(self.dtype).removeprefix("torch.")
        flags = [
            *("--served-model-name", SERVED_NAME, "--dtype", dtype, *self.work.engine_flags),
            *("--kv-cache-memory-bytes", str(self.work.cache_bytes), *self.vllm_flags),
        ]
        slug, url = name.name.lower(), WITHOUT_REDIS
        match name:
            case ServerName.SHARED:
                socket, bridge = self.directory / "weights.sock", self.directory / "bridge.json"
                flags += ["--share-weights", "--weights-socket", str(socket)]
                flags += ["--bridge-config-path", str(bridge)]
            case ServerName.LORA | ServerName.PLAIN:
                url, place = self.redis_url, served_weights_directory(self.files_of(name))
                flags += ["--weights-dir", str(place), "--run-id", slug]
                flags += LORA_FLAGS if name is ServerName.LORA else ()
        is_bare = name is ServerName.BARE
        command = (
            stock_vllm(self.model, *flags)
            if is_bare
            else our_server(self.model, *flags, redis_url=url)
        )
        # Servers that start side by side would compile into one place.
        cache = {"VLLM_CACHE_ROOT": str(self.kept / "vllm-cache" / slug)}
        return launch(slug, command, self.directory, cache)

    def begin(self, heading: str) -> None:
        """Of a part: what is said from now on is its section of the results."""
        self._heading, self.rows, self.left_out, self.below = heading, {}, [], []

    def say(
        self,
        name: str,
        unit: str,
        values: Sequence[float],
        limit: Limit | None = None,
        goal: Goal | None = None,
    ) -> None:
        """Print and write the median of `values`, in place of a previous one of this name. `goal`:
        of the value or, if there is a limit, of its ratio to that."""
        middle = median(values)
        measured = " ".join(filter(None, [spread(values), unit]))
        row = [name, f"{measured}, n = {len(values)}", "", "", ""]
        judged = middle
        if limit is not None:
            judged = middle / limit.value
            row[2] = f"{number(limit.value)} ({limit.reason})"
            row[3] = number(judged)
        if goal is not None and self.on_gpu:
            row[4] = f"{goal}: {verdict(goal.is_met(judged))}"
        self.rows[name] = row
        self._write(["; ".join(filter(None, row))])

    def leave_out(self, name: str, reason: str) -> None:
        line = f"- not run: {name} ({' '.join(reason.split())[:300]})"
        self.left_out.append(line)
        self._write([line])

    def add(self, lines: Sequence[str]) -> None:
        """Print and write lines below the table."""
        self.below += [*lines, ""]
        self._write(lines)

    def _write(self, new: Sequence[str]) -> None:
        sys.stdout.write("\n".join([*new, ""]))
        sys.stdout.flush()
        if self.results is not None:
            head = ["", "measured", "limit", "measured / limit", "goal"]
            rows = table([head, *self.rows.values()]) if self.rows else []
            blocks = (self.about, rows, self.left_out, self.below)
            body = [line for block in blocks if block for line in (*block, "")]
            replace_section(self.results, self._heading, body)


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
    return host_facts(
        gpu(),
        f"{versions()}, CUDA {torch.version.cuda}",
        f"copy {rates.bandwidth / 1e12:.3g} TB/s read and written (an H200's datasheet: "
        f"{BANDWIDTH_H200 / 1e12:g}), {products} matrix product {rates.flops / 1e12:.3g} TFLOP/s, "
        "both measured",
    )
