"""All that is to be seen on a borrowed GPU host, in 13 minutes: `python -m benchmarks.gpu_visit`.

What matters most comes first. Each part is a process of its own, which is killed after its limit;
the others run all the same. Figures are on disk as soon as they are known. Another visit to the
same directory goes on with the parts that were not done; those that failed come last.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, Literal

import psutil
from pydantic import Field

from benchmarks.gpu_bench.host import commit, gpu, versions
from benchmarks.report import replace_section, table
from grpo_core.deadline import Deadline
from grpo_core.process import (
    ManagedProcess,
    ProcessFailed,
    adopt_orphans,
    end_orphans,
)
from grpo_core.settings import Command, CommandSettings, load_settings

RESULTS, OUTCOMES, LOG = "results.md", "outcomes.json", "visit.log"
SECTION = "GPU visit"
GRACE_S = 5.0
"""For a part to end its servers after SIGTERM."""
CPU_FACTOR = 10.0
"""How much longer a rehearsal on a CPU, and each of its parts, may take."""
MEASURED = 0.6
"""Share of a part's limit after which it begins nothing new; to start takes time, too."""
DONE, FAILED = "done", "failed"
SHOWN_LINES, SHOWN_CHARACTERS = 4, 400
"""Of the output of a part that failed."""
MARK = "GPU_VISIT"
"""Variable of all processes of a visit: its directory."""


class GpuVisitSettings(CommandSettings):
    """Test and measure all that needs a GPU, part by part, in the order of importance."""

    command: ClassVar[Command] = Command(prog="gpu-visit", env_prefix="GPU_VISIT_")

    directory: Path = Field(
        Path("runs/gpu-visit"),
        description="Directory of the results; a later visit goes on with its parts that were not "
        "done",
    )
    size: Literal["tiny", "0.5b"] = Field(
        "0.5b", description="Shape of the model; tiny rehearses the visit on a CPU"
    )
    seconds: float = Field(
        780.0, gt=0, description="Seconds of the visit; ten times as many with tiny"
    )
    kept: Path = Field(
        Path(tempfile.gettempdir()) / "grpo-gpu-visit",
        description="Directory of models and compiled code, which is large",
    )
    commit: str | None = Field(
        None, description="The commit, on a host without git (default: git's HEAD)"
    )

    @property
    def factor(self) -> float:
        """Times as long as on a GPU."""
        return CPU_FACTOR if self.size == "tiny" else 1.0


@dataclass(frozen=True)
class Part:
    name: str
    limit_s: float
    command: Sequence[str]


@dataclass(frozen=True)
class Outcome:
    """`facts`: of host and commit at that time."""

    state: str
    detail: str
    facts: str


def parts_of(settings: GpuVisitSettings) -> list[Part]:
    """In the order in which they run."""
    on_cpu, run_tests = settings.size == "tiny", Path(__file__).parents[1] / "tests/gpu/run.sh"

    def part(name: str, limit_s: float, *command: str | Path) -> Part:
        return Part(name, settings.factor * limit_s, [*map(str, command)])

    def bench(name: str, limit_s: float, part_name: str, size: str = settings.size) -> Part:
        words = [
            "--parts",
            part_name,
            "--size",
            size,
            "--seconds-budget",
            f"{MEASURED * limit_s:g}",
        ]
        words += ["--results", str(settings.directory / RESULTS), "--directory", str(settings.kept)]
        words += ["--commit", settings.commit] if settings.commit else []
        return part(name, limit_s, sys.executable, "-m", "benchmarks.gpu", *words)

    steps = ["tiny"] if on_cpu else ["0.5b", "1.5b"]
    return [
        part("proof", 60, "bash", run_tests, *["--any-device"] * on_cpu, "proof"),
        *(bench(f"step {size}", 75, "train", size) for size in steps),
        bench("two restarts", 90, "restart"),
        bench("decode", 150, "decode"),
        bench("publish", 90, "publish"),
        bench("demo", 60, "demo"),
    ]


class Visit:
    """Args:
    directory: of the results and the outcomes
    facts: of host and commit, in one line
    """

    def __init__(self, parts: Sequence[Part], directory: Path, facts: str) -> None:
        self._parts, self._directory, self._facts = parts, directory, facts
        directory.mkdir(parents=True, exist_ok=True)
        self._mark = str(directory.resolve())
        end_marked(self._mark)
        kept = directory / OUTCOMES
        found = json.loads(kept.read_text()) if kept.exists() else {}
        self.outcomes = {name: Outcome(**outcome) for name, outcome in found.items()}
        self._write()

    def run(self, left_s: Callable[[], float]) -> None:
        """Run what is not done and fits into the time that is left; parts that failed come last.

        Orphans of a part, for example its servers, end with it.
        """
        spare = adopt_orphans()
        failed = {name for name, outcome in self.outcomes.items() if outcome.state == FAILED}
        for part in sorted(self._parts, key=lambda part: part.name in failed):
            is_done = part.name in self.outcomes and part.name not in failed
            if is_done or part.limit_s > left_s():
                continue
            sys.stdout.write(f"{part.name}: at most {part.limit_s:.0f} s\n")
            sys.stdout.flush()
            try:
                state, detail = self._ran(part)
            finally:
                end_orphans(spare)
            sys.stdout.write(f"{part.name}: {state}, {detail}\n")
            self.outcomes[part.name] = Outcome(state, detail, self._facts)
            self._write()

    def _ran(self, part: Part) -> tuple[str, str]:
        """State and detail."""
        variables = {"PYTHON": sys.executable, MARK: self._mark}
        process = ManagedProcess(part.name, part.command, self._directory / LOG, variables)
        end = Deadline(part.limit_s)
        try:
            code = process.wait(part.limit_s)
        except ProcessFailed:
            return FAILED, f"killed after {part.limit_s:g} s: {_end_of(process)}"
        finally:
            process.stop(GRACE_S)
        took = f"{part.limit_s - end.left_s:.0f} s"
        return (DONE, took) if code == 0 else (FAILED, f"after {took}: {_end_of(process)}")

    def _write(self) -> None:
        """The outcomes, and their table in the results."""
        temporary = self._directory / f"{OUTCOMES}.tmp"
        temporary.write_text(json.dumps({n: asdict(o) for n, o in self.outcomes.items()}, indent=1))
        os.replace(temporary, self._directory / OUTCOMES)
        rows = [["part", "limit", "outcome"]]
        for part in self._parts:
            found = self.outcomes.get(part.name)
            said = f"{found.state} ({found.detail})" if found else "left out (time)"
            rows.append([part.name, f"{part.limit_s:g} s", said.replace("|", "/")])
        hosts: dict[str, list[str]] = {}
        for name, outcome in self.outcomes.items():
            hosts.setdefault(outcome.facts, []).append(name)
        facts = [f"- {', '.join(names)}: {host}" for host, names in hosts.items()]
        body = ["`make gpu-visit`; the figures are in the next sections.", "", *facts, ""]
        replace_section(self._directory / RESULTS, SECTION, [*body, *table(rows)])


def _end_of(process: ManagedProcess) -> str:
    """Of what it wrote."""
    lines = [line for line in process.log_text().splitlines() if line.strip()]
    return " / ".join(lines[-SHOWN_LINES:])[-SHOWN_CHARACTERS:]


def end_marked(mark: str) -> None:
    """Kill what a visit that was killed itself has left."""
    left: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or belongs to another user
            if process.environ().get(MARK) == mark:
                left |= {process, *process.children(recursive=True)}
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def main() -> int:
    settings = load_settings(GpuVisitSettings, sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the part
    end = Deadline(settings.factor * settings.seconds)
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    facts = f"{now}, commit {settings.commit or commit()}; {gpu()}; {versions()}"
    visit = Visit(parts_of(settings), settings.directory, facts)
    visit.run(lambda: end.left_s)
    sys.stdout.write((settings.directory / RESULTS).read_text())
    return any(outcome.state == FAILED for outcome in visit.outcomes.values())


if __name__ == "__main__":
    sys.exit(main())
