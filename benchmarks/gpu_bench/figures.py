"""What was measured: records that are printed, appended to a file, and read back from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Literal, Self, TextIO

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from benchmarks.gpu_bench.settings import PartName
from benchmarks.gpu_bench.shapes import ShapeName


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Goal(_Record):
    kind: Literal["at least", "at most"]
    bound: float

    def is_met(self, value: float) -> bool:
        return value >= self.bound if self.kind == "at least" else value <= self.bound

    def __str__(self) -> str:
        return f"{self.kind} {self.bound:g}"


class Limit(_Record):
    """`what` sets it; in the unit of the figure."""

    value: float
    what: str


class Figure(_Record):
    """One number: the median of `repeats` measurements unless its name says otherwise.

    `low`, `high`: of the measurements; None where the number is no median.
    """

    record: Literal["figure"] = "figure"
    part: PartName
    name: str
    unit: str
    value: float
    repeats: int
    low: float | None = None
    high: float | None = None
    limit: Limit | None = None
    goal: Goal | None = None

    @classmethod
    def of(
        cls,
        part: PartName,
        name: str,
        unit: str,
        values: Sequence[float],
        *,
        limit: Limit | None = None,
        goal: Goal | None = None,
    ) -> Self:
        """Args: values: one at least"""
        return cls(
            part=part,
            name=name,
            unit=unit,
            value=median(values),
            repeats=len(values),
            low=min(values),
            high=max(values),
            limit=limit,
            goal=goal,
        )

    @property
    def of_limit(self) -> float | None:
        return None if self.limit is None else self.value / self.limit.value


class NotRun(_Record):
    """`name`: of what in the part; "" for all of it."""

    record: Literal["not run"] = "not run"
    part: PartName
    name: str
    reason: str


class RunFacts(_Record):
    """Begins the records of one run. `measured_on`: what, with what, at which rates."""

    record: Literal["run"] = "run"
    size: ShapeName
    on_gpu: bool
    date: str
    commit: str
    command: str
    measured_on: tuple[str, ...]


Record = Annotated[RunFacts | Figure | NotRun, Field(discriminator="record")]
_PARSED: TypeAdapter[RunFacts | Figure | NotRun] = TypeAdapter(Record)


class Recorder:
    """Keeps, prints and appends: a run that is cut off has said all that it knew."""

    def __init__(self, path: Path, out: TextIO) -> None:
        self.records: list[RunFacts | Figure | NotRun] = []
        self._path = path
        self._out = out
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, record: RunFacts | Figure | NotRun) -> None:
        self.records.append(record)
        with self._path.open("a") as file:
            file.write(record.model_dump_json(exclude_defaults=False) + "\n")
        self._out.write(told(record) + "\n")
        self._out.flush()


def read_records(lines: Iterable[str]) -> list[RunFacts | Figure | NotRun]:
    """Raises `pydantic.ValidationError` where a line is no record."""
    return [_PARSED.validate_json(line) for line in lines if line.strip()]


def told(record: RunFacts | Figure | NotRun) -> str:
    """In one line; facts of a run in several."""
    match record:
        case RunFacts():
            return "\n".join([f"{record.date}, commit {record.commit}", *record.measured_on])
        case NotRun():
            return f"{record.part}: {record.name or 'all of it'}: not run: {record.reason}"
    parts = [f"{record.part}: {record.name}: {shown(record)}"]
    if record.limit is not None:
        parts.append(f"{number(record.of_limit or 0.0)} x the limit ({record.limit.what})")
    if record.goal is not None:
        parts.append(verdict(record))
    return "; ".join(parts)


def shown(figure: Figure) -> str:
    """The value with its unit, spread and number of measurements."""
    text = " ".join(filter(None, [number(figure.value), figure.unit]))
    spread = ""
    if figure.low is not None and figure.high is not None and figure.repeats > 1:
        spread = f"{number(figure.low)} to {number(figure.high)}, "
    return f"{text} ({spread}n = {figure.repeats})"


def verdict(figure: Figure) -> str:
    """ "" without a goal."""
    if figure.goal is None:
        return ""
    return f"goal {figure.goal}: {'met' if figure.goal.is_met(figure.value) else '**missed**'}"


def number(value: float) -> str:
    """Three digits at least, never an exponent."""
    magnitude = abs(value)
    digits = 0 if magnitude >= 100 else 1 if magnitude >= 10 else 2 if magnitude >= 1 else 3
    return f"{value:,.{digits}f}"
