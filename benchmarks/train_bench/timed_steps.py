"""Steps with torch's own AdamW, timed; imported by the interpreters of TRL and of this project."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

try:
    from benchmarks.train_bench.memory import PeakMemory
except ModuleNotFoundError:  # TRL's interpreter runs a script beside this file
    from memory import PeakMemory  # type: ignore[import-not-found,no-redef]


def timed_steps(model: Any, losses: Sequence[Callable[[], Tensor]], steps: int) -> dict[str, Any]:
    """Args: losses: compute those of a step's micro-batches, which add up to the step's."""
    memory = PeakMemory(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    totals, norms, seconds = [], [], []
    for _ in range(steps):
        began = time.perf_counter()
        total = 0.0
        for compute in losses:
            loss = compute()
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        totals.append(total)
    return {
        "loss": totals[0],
        "norm": norms[0],
        "step_s": statistics.median(seconds[1:]),
        "peak_bytes": memory.bytes(),
    }
