"""What every part of the benchmark works with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu_bench.budget import Deadline
from benchmarks.gpu_bench.figures import Figure, Goal, Limit, NotRun, Recorder
from benchmarks.gpu_bench.rates import Rates
from benchmarks.gpu_bench.servers import Server, ServerName, ServerPool
from benchmarks.gpu_bench.settings import PartName, Workload
from benchmarks.gpu_bench.shapes import ModelShape, ShapeName

NO_GPU = "no GPU"
TIME_IS_UP = "the time was up"
MS_PER_S = 1e3
GIB = 2**30
START_SHARE = 0.7


@dataclass(frozen=True)
class Bench:
    """`model`: its checkpoint; `adapters`: directory that the server takes them from;
    `used_before`: bytes of the GPU's memory before any server, 0 without one."""

    size: ShapeName
    shape: ModelShape
    workload: Workload
    device: torch.device
    rates: Rates
    recorder: Recorder
    pool: ServerPool
    adapters: Path
    model: Path
    used_before: int
    end: Deadline
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

    def server(self, name: ServerName, beside: Sequence[ServerName] = ()) -> Server:
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
