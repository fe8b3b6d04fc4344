"""`python -m benchmarks.servers_simulation`: 100 and 1,000 servers that follow a run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

import structlog
from pydantic import Field

from benchmarks.run_api_bench.report import table
from benchmarks.run_api_bench.results_file import replace_section
from benchmarks.servers_simulation.run import Case, Result, simulate
from grpo_core.settings import Command, CommandSettings, load_settings

SECTION = "several servers: simulation"
WAYS = ((False, False), (True, False), (False, True), (True, True))
"""(with peers, with deltas)"""
NAMES = {
    (False, False): "whole files, trainer alone",
    (True, False): "whole files, peers too",
    (False, True): "deltas, trainer alone",
    (True, True): "deltas, peers too",
}
GB = 10**9


class SimulationSettings(CommandSettings):
    """Simulate servers that follow a run, in virtual time."""

    command: ClassVar[Command] = Command(prog="simulate-servers", env_prefix="SIMULATE_")

    servers: int = Field(100, ge=1, description="Number of servers")
    versions: int = Field(12, ge=1, description="Versions that the trainer announces")
    seed: int = Field(0, ge=0, description="Seed of the losses")
    skip_alone: bool = Field(
        False, description="Leave out the cases in which servers do not help each other"
    )
    plot: Path | None = Field(None, description="PNG to draw")
    results: Path | None = Field(None, description="Markdown file whose section is replaced")


def main() -> None:
    settings = load_settings(SimulationSettings, sys.argv[1:])
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    found: dict[tuple[bool, bool], Result] = {}
    for way in [(peers, deltas) for peers, deltas in WAYS if peers or not settings.skip_alone]:
        case = Case(settings.servers, *way, versions=settings.versions, seed=settings.seed)
        found[way] = simulate(case)
        sys.stdout.write(f"{NAMES[way]}: {_row(way, found[way])}\n")
        sys.stdout.flush()
    heading = ["", "until 99 % serve, s", "trainer sends", "steps behind", "servers lost"]
    lines = [_about(case), "", *table([heading, *(_row(way, each) for way, each in found.items())])]
    sys.stdout.write("\n".join([*lines, ""]))
    if settings.results:
        replace_section(settings.results, f"{SECTION}, {settings.servers:,} servers", lines)
    if settings.plot:
        _draw(found, settings.plot)


def _row(way: tuple[bool, bool], result: Result) -> list[str]:
    ordered = sorted(result.until_99_s)
    per_version = result.trainer_bytes / len(ordered) / GB
    return [
        NAMES[way],
        f"{result.median_until_99_s:,.0f} ({ordered[0]:,.0f} to {ordered[-1]:,.0f})",
        f"{per_version:,.1f} GB a version",
        f"{result.staleness:.2f}",
        f"{result.losses} in {result.seconds / 60:,.0f} min",
    ]


def _about(case: Case) -> str:
    today = datetime.now(UTC).date().isoformat()
    return (
        f"`python -m benchmarks.servers_simulation` on {today}: {case.servers:,} servers, "
        f"{case.versions} versions, one every {case.every_s:g} s or, if that takes longer, as soon "
        f"as 99 % serve the last one. {case.full_bytes / GB:g} GB in full, "
        f"{case.delta_bytes / GB:g} GB as a delta; links of {8 * case.link_bytes_per_s / GB:g} "
        f"Gb/s, {1000 * case.latency_s:g} ms; digests at {case.verify_bytes_per_s / GB:g} GB/s, "
        f"deltas applied at {case.apply_bytes_per_s / GB:g} GB/s; a pause of {case.pause_s:g} s. "
        f"Each server is lost {case.losses_per_hour:g} times an hour, and another one starts in "
        f"{case.start_s:g} s, after it has fetched the newest version. Median (lowest to highest). "
        "The follower and the fetcher are the product's; Redis, network, memory and engine are "
        "stand-ins with these speeds. Nothing of this was measured on such hosts."
    )


def _draw(found: dict[tuple[bool, bool], Result], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.5))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for way, result in found.items():
        steps: Sequence[int] = range(1, 1 + len(result.until_99_s))
        axes.plot(steps, result.until_99_s, marker=".", label=NAMES[way])
    axes.set_yscale("log")
    axes.set_xlabel("version")
    axes.set_ylabel("seconds until 99 % of the servers serve it")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
