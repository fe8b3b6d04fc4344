"""Tables, facts about the machine, and sections of RESULTS.md, for all benchmarks."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from math import floor, log10
from pathlib import Path
from statistics import median

import psutil

_TITLE = "# Results"
_SECTION = "## "


def publish(name: str, lines: Sequence[str], results: Path | None) -> None:
    """Print `lines`, and write them under the heading `name` of `results`."""
    sys.stdout.write("\n".join([*lines, ""]))
    if results is not None:
        replace_section(results, name, lines)


def publish_table(
    name: str, about: str, rows: Sequence[Sequence[str]], results: Path | None
) -> None:
    """Publish what was measured, the facts about the machine, and a table."""
    publish(name, [about, "", *host_facts(), "", *table(rows)], results)


def replace_section(path: Path, name: str, body: Sequence[str]) -> None:
    """Write `body` under the heading `name`, in place of the previous section of that name."""
    old = path.read_text().splitlines() if path.exists() else [_TITLE]
    heading = _SECTION + name
    start = old.index(heading) if heading in old else len(old)
    end = next((at for at in range(start + 1, len(old)) if old[at].startswith(_SECTION)), len(old))
    before, after = _stripped(old[:start]), _stripped(old[end:])
    section = [heading, "", *_stripped(list(body))]
    text = "\n\n".join("\n".join(part) for part in (before, section, after) if part)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text + "\n")
    os.replace(temporary, path)


def _stripped(lines: list[str]) -> list[str]:
    """Without blank lines at either end."""
    return "\n".join(lines).strip("\n").split("\n") if any(lines) else []


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Markdown with padded columns. The first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |"
        for row in rows
    ]
    return [lines[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *lines[1:]]


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    digits = max(0, 2 - floor(log10(abs(value)))) if value else 0
    return f"{value:,.{digits}f}"


def spread(values: Sequence[float]) -> str:
    """median (lowest to highest); one number if they are the same"""
    low, high = min(values), max(values)
    if low == high:
        return number(low)
    return f"{number(median(values))} ({number(low)} to {number(high)})"


def verdict(is_met: bool) -> str:
    return "met" if is_met else "**missed**"


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def host_facts(*more: str) -> list[str]:
    """A list in Markdown: CPU, memory, system, load, and `more`. The machine is not named."""
    memory_gib = psutil.virtual_memory().total / 2**30
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    facts = [
        f"CPU: {_cpu_model()}, {cores} cores; memory: {memory_gib:.0f} GiB",
        f"Linux {platform.release()}, Python {platform.python_version()}; load average {load:.1f}",
        *more,
    ]
    return [f"- {fact}" for fact in facts]


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
