"""Options of `grpo-report`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from grpo_core.settings import Command, CommandSettings, Mistake, Shown
from grpo_core.settings.machine import not_writable


class ReportSettings(CommandSettings):
    """Writes one HTML file that shows a run: its curves, and its rollouts with every token. The
    run may still be training. The file needs no network and no server."""

    command: ClassVar[Command] = Command(
        prog="grpo-report",
        env_prefix="GRPO_REPORT_",
        positional=("run",),
        examples=(
            "grpo-report runs/latest --open",
            "grpo-report runs/latest --output report.html",
        ),
    )

    run: Path = Field(description="Directory of the run, or the --save-path of a trainer")
    output: Annotated[Path | None, Shown(default="<run>/report.html")] = Field(
        None, description="File to write"
    )
    open: bool = Field(False, description="Show the file in a browser")

    def start_mistakes(self) -> Iterator[Mistake]:
        if not self.run.is_dir():
            yield Mistake("run", f"no such directory: {self.run}; name the directory of a run")
        elif self.output is not None and self.output.is_dir():
            yield Mistake("output", f"{self.output} is a directory; name a file")
        elif problem := not_writable(self.output.parent if self.output else self.run):
            yield Mistake("output", problem)
