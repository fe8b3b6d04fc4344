"""Steps with torch's own AdamW, timed; imported by the interpreters of TRL and of this project."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_RESET_PEAK = "5"


class PeakMemory:
    """Growth of the resident memory, from here to its highest, without the model's weights."""

    def __init__(self, model: Any) -> None:
        for parameter in model.parameters():  # loaded when they are first read
            parameter.detach().sum()
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
        self._before = _status("VmRSS")

    def bytes(self) -> int:
        return _status("VmHWM") - self._before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (value,) = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return 1024 * int(value)


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
