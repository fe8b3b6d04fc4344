"""The steps of a run, followed while the trainer appends to the metrics file: their curves."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Literal

from grpo_core.rollouts.page.encode import PART, TITLES
from grpo_runs.report.steps import numbers_of
from grpo_runs.watch.followed_file import FollowedFile

Axis = Literal["step", "time", "tokens"]
LOSS = "train/loss"
PARTS = {
    "wait": "train/data_fetch_time",
    "train": "train/compute_time",
    "publish": "train/sync_time",
    "save": "train/save_time",
}
"""Of the time of a step: their names on the page, and those of their metrics."""
CurvePoint = tuple[float, float, int]
"""Position, value and step."""


@dataclass(frozen=True)
class Row:
    """One step.

    Args:
        serial: counts up over all rows that were ever read, so that a repeated step is a new row
        time: seconds of all steps up to this one and of saving between them, those before a resume
            included
        tokens: prompt and completion tokens of all steps up to this one
        values: the metrics that have a curve, by name
        parts: seconds of the parts of the step, as in `PARTS`
    """

    serial: int
    step: int
    time: float
    tokens: float
    values: Mapping[str, float]
    parts: tuple[float, ...]


class MetricsLog:
    """Follows `metrics.jsonl`. A resumed run writes the steps after its checkpoint again; their
    rows replace the earlier ones.

    Args: path: it may not exist yet
    """

    def __init__(self, path: Path) -> None:
        self._file = FollowedFile(path)
        self._serial = 0
        self.rows: list[Row] = []
        self.newest: Mapping[str, float] = {}
        """All numbers of the newest step."""
        self.broken_lines: list[int] = []
        """Numbers of the complete lines that are no record of a step."""
        self.restarts = 0
        """How often another file was in the place of the one that had been read."""

    def read_new(self) -> None:
        """Never raises: a file that is away has no new rows."""
        for line in self._file.read(self._restart):
            try:
                numbers = numbers_of(line)
            except ValueError:
                self.broken_lines.append(self._file.number)
            else:
                self._add(int(numbers["step"]), numbers)

    def _restart(self) -> None:
        """A trainer that resumes has written the file again, shorter."""
        self.restarts += 1
        self.broken_lines.clear()
        self.rows.clear()

    def since(self, serial: int) -> list[Row]:
        """The rows that are newer."""
        return self.rows[bisect_right(self.rows, serial, key=lambda row: row.serial) :]

    def curves(self, axis: Axis, most: int) -> dict[str, list[CurvePoint]]:
        """Of each metric at most about `most` points, among them every minimum and maximum."""
        found: dict[str, list[CurvePoint]] = {}
        for row in self.rows:
            at = getattr(row, axis)
            for name, value in row.values.items():
                found.setdefault(name, []).append((at, value, row.step))
        return {name: thinned(points, most) for name, points in found.items()}

    def position_of(self, step: float, axis: Axis) -> float | None:
        """Where a step lies on an axis; None if it was not taken."""
        if axis == "step":
            return step
        if step == 0:
            return 0.0
        at = bisect_left(self.rows, step, key=lambda row: row.step)
        return getattr(self.rows[at], axis) if at < len(self.rows) else None

    def _add(self, step: int, numbers: Mapping[str, float]) -> None:
        seconds = numbers.get("train/step_time", 0.0)
        tokens = seconds * numbers.get("throughput/tokens_per_s", 0.0)
        while self.rows and self.rows[-1].step >= step:
            self.rows.pop()
        last = self.rows[-1] if self.rows else None
        self._serial += 1
        self.newest = numbers
        self.rows.append(
            Row(
                self._serial,
                step,
                (last.time if last else 0.0) + seconds + numbers.get(PARTS["save"], 0.0),
                (last.tokens if last else 0.0) + tokens,
                {name: value for name, value in numbers.items() if _is_shown(name)},
                tuple(numbers.get(name, 0.0) for name in PARTS.values()),
            )
        )


def _is_shown(name: str) -> bool:
    return name in TITLES or name == LOSS or name.startswith(PART)


def thinned(points: Sequence[CurvePoint], most: int) -> list[CurvePoint]:
    """The first and the last point, and of equal parts of the others the lowest and the highest:
    at most `most` points, or all if there are not more."""
    if len(points) <= most:
        return [*points]
    parts = max(1, (most - 2) // 2)
    inner = points[1:-1]
    kept = [points[0]]
    for number in range(parts):
        part = inner[number * len(inner) // parts : (number + 1) * len(inner) // parts]
        if part:
            kept += sorted({min(part, key=itemgetter(1)), max(part, key=itemgetter(1))})
    return [*kept, points[-1]]
