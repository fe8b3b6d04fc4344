"""The results as Markdown: a table per scenario, run-api beside atroposlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.run_api_bench.metrics import Metric, Reading, Spread, verdict
from benchmarks.run_api_bench.scenario import Scenario
from benchmarks.run_api_bench.settings import SystemName

NOT_MEASURED = "-"
_HEAD = ("", "unit", "atroposlib", "run-api", "ratio", "goal")
_VERDICTS = {True: "met", False: "**missed**", None: "not judged"}


class Results:
    """Readings of every run, by scenario, system and metric, in the order they came."""

    def __init__(self) -> None:
        self._values: dict[tuple[Scenario, Metric], dict[SystemName, list[float]]] = {}

    def add(self, scenario: Scenario, system: SystemName, readings: Sequence[Reading]) -> None:
        for reading in readings:
            by_system = self._values.setdefault((scenario, reading.metric), {})
            by_system.setdefault(system, []).append(reading.value)

    def rows(self, scenario: Scenario) -> list[ApiRow]:
        return [
            ApiRow(metric, {name: Spread.of(values) for name, values in by_system.items()})
            for (of_scenario, metric), by_system in self._values.items()
            if of_scenario is scenario
        ]


@dataclass(frozen=True)
class ApiRow:
    """One metric, for each system that was measured."""

    metric: Metric
    spreads: Mapping[SystemName, Spread]

    def cells(self) -> list[str]:
        theirs, ours = self.spreads.get("atroposlib"), self.spreads.get("run-api")
        return [
            self.metric.name,
            self.metric.unit,
            spread_text(theirs),
            spread_text(ours),
            _ratio(ours, theirs),
            self._goal(ours, theirs),
        ]

    def _goal(self, ours: Spread | None, theirs: Spread | None) -> str:
        if self.metric.goal is None:
            return ""
        return f"{self.metric.goal}: {_VERDICTS[verdict(self.metric, ours, theirs)]}"


def scenario_section(scenario: Scenario, results: Results) -> list[str]:
    """Heading, explanation, table."""
    cells = [list(_HEAD), *(row.cells() for row in results.rows(scenario))]
    return [f"### {scenario.title}", "", scenario.explanation, "", *table(cells)]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Padded, so that it reads on a terminal too. The first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |"
        for row in rows
    ]
    return [lines[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *lines[1:]]


def spread_text(spread: Spread | None) -> str:
    if spread is None:
        return NOT_MEASURED
    if spread.low == spread.high:
        return _number(spread.median)
    return f"{_number(spread.median)} ({_number(spread.low)} to {_number(spread.high)})"


def _ratio(ours: Spread | None, theirs: Spread | None) -> str:
    """Of the medians, as a fraction where it is below one."""
    if ours is None or theirs is None or min(ours.median, theirs.median) <= 0:
        return NOT_MEASURED
    ratio = ours.median / theirs.median
    return f"1/{1 / ratio:.1f}" if ratio < 1 else f"{ratio:.1f}"


def _number(value: float) -> str:
    """Three digits, never an exponent."""
    magnitude = abs(value)
    return f"{value:,.{0 if magnitude >= 100 else 1 if magnitude >= 10 else 2}f}"
