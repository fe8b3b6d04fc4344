"""Peak memory of this process; imported by every side's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
