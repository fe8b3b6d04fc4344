"""The records as Markdown: a section per size, in it a table per part; and what has not been run.

A part that was measured again takes the place of its table, the others stay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu_bench.figures import Figure, NotRun, RunFacts, number, shown, verdict
from benchmarks.gpu_bench.settings import PARTS, PartName
from benchmarks.gpu_bench.shapes import ShapeName
from benchmarks.run_api_bench.results_file import replace_section

STATUS_SECTION = "GPU"
STATUS_SIZES: tuple[ShapeName, ...] = ("0.5b", "1.5b", "7b")
COMMAND = "make bench-gpu SIZE={size}"
_HEAD = ("", "measured", "limit", "measured / limit", "goal")
_SECTION, _PART = "## ", "### "
_STATUS_ROW = re.compile(r"\| (\S+) +\| (\S+) +\| (.*?) +\|")
_SPREAD_EXPLAINED = (
    "Medians (lowest to highest, number of measurements); p50 and p99 are percentiles by nearest "
    "rank. *limit* is what the hardware allows, by rates measured in the same run."
)

Records = Sequence[RunFacts | Figure | NotRun]


def write_results(path: Path, records: Records) -> None:
    """Replace what `records` (of one run) have measured; needs the facts of the run among them."""
    facts = next(record for record in records if isinstance(record, RunFacts))
    old = path.read_text().splitlines() if path.exists() else []
    tables = part_tables(facts, records)
    if tables:
        replace_section(path, section_name(facts), merged(_section_of(old, facts), tables))
    if facts.on_gpu:
        states = status_states(_lines_under(old, STATUS_SECTION)) | _states(facts, records)
        replace_section(path, STATUS_SECTION, status_section(states))


def section_name(facts: RunFacts) -> str:
    return f"GPU: {facts.size}" if facts.on_gpu else f"GPU: {facts.size} (on a CPU)"


def part_tables(facts: RunFacts, records: Records) -> dict[PartName, list[str]]:
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


def status_section(states: Mapping[tuple[str, str], str]) -> list[str]:
    """Args: states: by size and part; what is missing has not been run."""
    rows = [
        (size, part, states.get((size, part), f"not run on a GPU yet: `{command(size, part)}`"))
        for size in STATUS_SIZES
        for part in PARTS
    ]
    return [
        "What has run on a GPU, and the command for what has not. `make bench-gpu SIZE=<size>` "
        "measures all parts of a size.",
        "",
        *table([("size", "part", "state"), *rows]),
    ]


def status_states(lines: Sequence[str]) -> dict[tuple[str, str], str]:
    """What `status_section` was told of the parts that have run."""
    rows = [match.groups() for line in lines if (match := _STATUS_ROW.fullmatch(line))]
    return {
        (size, part): state
        for size, part, state in rows
        if part in PARTS and not state.startswith("not run on a GPU yet")
    }


def command(size: str, part: str) -> str:
    return f'{COMMAND.format(size=size)} BENCH_FLAGS="--parts {part}"'


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Padded, so that it reads on a terminal too. The first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |"
        for row in rows
    ]
    return [lines[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *lines[1:]]


def _part_table(facts: RunFacts, figures: Sequence[Figure], left_out: list[NotRun]) -> list[str]:
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


def _states(facts: RunFacts, records: Records) -> dict[tuple[str, str], str]:
    return {
        (facts.size, part): f"{facts.date[:10]}, commit {facts.commit}{_gaps(records, part)}"
        for part in PARTS
        if _latest(records, part)
    }


def _gaps(records: Records, part: PartName) -> str:
    left_out = [_reason(record) for record in _left_out(records, part)]
    return f"; not run: {', '.join(left_out)}" if left_out else ""


def _reason(record: NotRun) -> str:
    """In one line of a table."""
    reason = " ".join(record.reason.split()).replace("|", "/")
    return f"{record.name} ({reason})" if record.name else reason


def _section_of(lines: Sequence[str], facts: RunFacts) -> list[str]:
    return _lines_under(lines, section_name(facts))


def _lines_under(lines: Sequence[str], name: str) -> list[str]:
    heading = _SECTION + name
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
