"""`python -m benchmarks.gpu_bench.render`: RESULTS.md from files of figures, without measuring."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field
from pydantic_settings import CliPositionalArg, SettingsConfigDict

from benchmarks.gpu_bench.figures import Figure, NotRun, RunFacts, read_records
from benchmarks.gpu_bench.report import STATUS_SECTION, status_section, write_results
from benchmarks.run_api_bench.results_file import replace_section
from grpo_core.settings import CommandSettings, load_settings


class RenderSettings(CommandSettings):
    """Write the sections of the runs that files of figures hold; with an empty file, what has not
    been run."""

    model_config = SettingsConfigDict(cli_prog_name="python -m benchmarks.gpu_bench.render")

    figures: CliPositionalArg[list[Path]] = Field(description="Files that runs appended to")
    results: Path = Field(
        Path("benchmarks/RESULTS.md"), description="Markdown file whose sections are replaced"
    )


def main() -> None:
    settings = load_settings(RenderSettings, sys.argv[1:])
    runs = [run for path in settings.figures for run in runs_in(path.read_text().splitlines())]
    if not runs:
        replace_section(settings.results, STATUS_SECTION, status_section({}))
    for run in runs:
        write_results(settings.results, run)


def runs_in(lines: Sequence[str]) -> list[list[RunFacts | Figure | NotRun]]:
    """The records of each run, its facts first."""
    runs: list[list[RunFacts | Figure | NotRun]] = []
    for record in read_records(lines):
        if isinstance(record, RunFacts):
            runs.append([])
        runs[-1].append(record)
    return runs


if __name__ == "__main__":
    main()
