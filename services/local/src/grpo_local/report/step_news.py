"""How far runs have come that write their own reports elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from grpo_local.report.metrics_file import MetricsFile, StepRecord
from grpo_local.screen import Screen

LINES_PER_RUN = 10


class StepNews:
    """A line after a run's first step, and then one per tenth of it.

    Args:
        metrics: name and metrics file of each run
    """

    def __init__(self, metrics: Iterable[tuple[str, Path]], screen: Screen) -> None:
        self._metrics = {name: MetricsFile(path) for name, path in metrics}
        self._screen = screen

    def tell(self) -> None:
        """Raises `ProtocolViolation` where the metrics file breaks its contract."""
        for name, metrics in self._metrics.items():
            for record in metrics.read_new():
                if record.step == 1 or record.step % max(1, record.steps // LINES_PER_RUN) == 0:
                    self._screen.line(_line(name, record))


def _line(name: str, record: StepRecord) -> str:
    return (
        f"{name:<12} step {record.step:>4}/{record.steps}  "
        f"reward {record.reward_mean:.3f}  {record.time_s:7.1f} s"
    )
