"""What was measured: records in a file, lines on the screen, tables in Markdown.

`python -m benchmarks.gpu_bench.report FILE...` writes the tables of such files without measuring.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, ClassVar, Literal, Self, TextIO

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from benchmarks.gpu_bench.settings import PARTS, PartName, ShapeName
from benchmarks.report import replace_section
from grpo_core.settings import Command, CommandSettings, load_settings


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


class GpuRunFacts(_Record):
    """Begins the records of one run. `measured_on`: what, with what, at which rates."""

    record: Literal["run"] = "run"
    size: ShapeName
    on_gpu: bool
    date: str
    commit: str
    command: str
    measured_on: tuple[str, ...]


Record = Annotated[GpuRunFacts | Figure | NotRun, Field(discriminator="record")]
_PARSED: TypeAdapter[GpuRunFacts | Figure | NotRun] = TypeAdapter(Record)


class GpuRecorder:
    """Keeps, prints and appends: a run that is cut off has said all that it knew."""

    def __init__(self, path: Path, out: TextIO) -> None:
        self.records: list[GpuRunFacts | Figure | NotRun] = []
        self._path = path
        self._out = out
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, record: GpuRunFacts | Figure | NotRun) -> None:
        self.records.append(record)
        with self._path.open("a") as file:
            file.write(record.model_dump_json(exclude_defaults=False) + "\n")
        self._out.write(told(record) + "\n")
        self._out.flush()


def read_records(lines: Iterable[str]) -> list[GpuRunFacts | Figure | NotRun]:
    """Raises `pydantic.ValidationError` where a line is no record."""
    return [_PARSED.validate_json(line) for line in lines if line.strip()]


def told(record: GpuRunFacts | Figure | NotRun) -> str:
    """In one line; facts of a run in several."""
    match record:
        case GpuRunFacts():
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


_HEAD = ("", "measured", "limit", "measured / limit", "goal")
_SECTION, _PART = "## ", "### "
_SPREAD_EXPLAINED = (
    "Medians (lowest to highest, number of measurements); p50 and p99 are percentiles by nearest "
    "rank. *limit* is what the hardware allows, by rates measured in the same run."
)

Records = Sequence[GpuRunFacts | Figure | NotRun]


def write_results(path: Path, records: Records) -> None:
    """Replace what `records` (of one run) have measured; needs the facts of the run among them."""
    facts = next(record for record in records if isinstance(record, GpuRunFacts))
    old = path.read_text().splitlines() if path.exists() else []
    tables = part_tables(facts, records)
    if tables:
        replace_section(path, section_name(facts), merged(_section_of(old, facts), tables))


def section_name(facts: GpuRunFacts) -> str:
    return f"GPU: {facts.size}" if facts.on_gpu else f"GPU: {facts.size} (on a CPU)"


def part_tables(facts: GpuRunFacts, records: Records) -> dict[PartName, list[str]]:
    """Of the parts with a figure: paragraphs on the run, the table, what was left out."""
    return {
        part: _part_table(facts, figures, _left_out(records, part))
        for part in PARTS
        if (figures := _latest(records, part))
    }


def merged(old: Sequence[str], tables: Mapping[PartName, Sequence[str]]) -> list[str]:
    """The section's lines, with `tables` in the place of what it said of those parts."""
    found = _by_part(old) | dict(tables.items())
    named = [(part, found[part]) for part in PARTS if part in found]
    blocks = [[f"{_PART}{part}", "", *_trimmed(lines), ""] for part, lines in named]
    return [_SPREAD_EXPLAINED, "", *(line for block in blocks for line in block)]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Padded, so that it reads on a terminal too. The first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |"
        for row in rows
    ]
    return [lines[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *lines[1:]]


def _part_table(facts: GpuRunFacts, figures: Sequence[Figure], left_out: list[NotRun]) -> list[str]:
    return [
        f"{facts.date}, commit {facts.commit}, `{facts.command}`. {'; '.join(facts.measured_on)}.",
        "",
        *table([_HEAD, *(_cells(figure) for figure in figures)]),
        *(["", *(f"- not run: {_reason(record)}" for record in left_out)] if left_out else []),
    ]


def _cells(figure: Figure) -> tuple[str, ...]:
    limit = figure.limit
    return (
        figure.name,
        shown(figure),
        "" if limit is None else f"{number(limit.value)} ({limit.what})",
        "" if figure.of_limit is None else number(figure.of_limit),
        verdict(figure).removeprefix("goal "),
    )


def _latest(records: Records, part: PartName) -> list[Figure]:
    """One figure per name: a number that was refined stands for those before it."""
    return list({r.name: r for r in records if isinstance(r, Figure) and r.part == part}.values())


def _left_out(records: Records, part: PartName) -> list[NotRun]:
    return [r for r in records if isinstance(r, NotRun) and r.part == part]


def _reason(record: NotRun) -> str:
    """In one line of a table."""
    reason = " ".join(record.reason.split()).replace("|", "/")
    return f"{record.name} ({reason})" if record.name else reason


def _section_of(lines: Sequence[str], facts: GpuRunFacts) -> list[str]:
    heading = _SECTION + section_name(facts)
    if heading not in lines:
        return []
    start = list(lines).index(heading) + 1
    ends = (at for at in range(start, len(lines)) if lines[at].startswith(_SECTION))
    return list(lines[start : next(ends, len(lines))])


def _by_part(lines: Sequence[str]) -> dict[str, Sequence[str]]:
    starts = [at for at, line in enumerate(lines) if line.startswith(_PART)]
    ends = [*starts[1:], len(lines)]
    return {
        lines[start].removeprefix(_PART): lines[start + 1 : end]
        for start, end in zip(starts, ends, strict=bool(starts))
    }


def _trimmed(lines: Sequence[str]) -> list[str]:
    """Without blank lines at either end."""
    return "\n".join(lines).strip("\n").split("\n")


class RenderSettings(CommandSettings):
    """Write the sections of the runs that files of figures hold."""

    command: ClassVar[Command] = Command(
        prog="python -m benchmarks.gpu_bench.report", positional=("figures",)
    )

    figures: list[Path] = Field(description="Files that runs appended to")
    results: Path = Field(
        Path("docs/contributing/benchmarks.md"),
        description="Markdown file whose sections are replaced",
    )


def main() -> None:
    settings = load_settings(RenderSettings, sys.argv[1:])
    runs = [run for path in settings.figures for run in runs_in(path.read_text().splitlines())]
    for run in runs:
        write_results(settings.results, run)


def runs_in(lines: Sequence[str]) -> list[list[GpuRunFacts | Figure | NotRun]]:
    """The records of each run, its facts first."""
    runs: list[list[GpuRunFacts | Figure | NotRun]] = []
    for record in read_records(lines):
        if isinstance(record, GpuRunFacts):
            runs.append([])
        runs[-1].append(record)
    return runs


if __name__ == "__main__":
    main()
