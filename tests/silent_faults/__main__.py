"""Injects every fault into a real run, on new and on old data, and takes healthy steps in two
modes. Writes the tables of docs/reference/silent-faults.md: one for each model."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import replace_section
from grpo_runs.process.ports import free_port
from tests.fixtures.inference import FILE_DTYPE, start_inference, stop_inference
from tests.fixtures.run_api import start_run_api
from tests.silent_faults import against_trl
from tests.silent_faults.exercise import FLOAT32, Subject, subject_of
from tests.silent_faults.faults import ALSO, FAULTS, LORA, SHARED, Fault
from tests.silent_faults.producer import FAULT_FROM
from tests.silent_faults.runs import KNOWN_WARNINGS, Report, Site, lora_site, run_with, shared_site
from tests.support.redis_server import start_redis

STALE = 2
"""Steps between sampling and training in the runs on old data."""
OF_TINY_MODEL = {SHARED: ("--lr", "1e-4"), LORA: ()}
"""Options of `grpo-demo` in healthy runs, by mode. With its own learning rate of 3e-4, a whole tiny
model solves all sums after 500 steps, and later steps wait for the few groups with different
scores."""
TRL_SECTION = "The same faults in TRL"


@dataclass(frozen=True)
class Row:
    """`reports`: what named the fault in each run, first on new and then on old data; None if
    nothing did."""

    name: str
    fault: Fault
    reports: list[Report | None]

    @property
    def is_caught(self) -> bool:
        return all(report is not None for report in self.reports)

    def cells(self) -> list[str]:
        caught = [_when(self.fault, report) for report in self.reports]
        on_old = caught[1] if len(caught) > 1 else ""
        names = dict.fromkeys(_check(report) for report in self.reports if report is not None)
        return [self.name, self.fault.injected, caught[0], on_old, ", ".join(names)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="make silent-faults", description=__doc__)
    parser.add_argument("--only", default="", help="faults whose name contains this text")
    parser.add_argument("--healthy-steps", type=int, default=1000, help="of each mode; 0: none")
    parser.add_argument(
        "--model", default="", help="smollm2 or a directory; without: the tiny model"
    )
    parser.add_argument("--dtype", default=FLOAT32, choices=[FLOAT32, "bfloat16"])
    parser.add_argument("--results", type=Path, help="page whose sections are replaced")
    options = parser.parse_args()
    subject = subject_of(options.model, options.dtype)
    lines = table(list(rows_of(subject, lambda name: options.only in name)))
    if options.healthy_steps:
        lines += [healthy(subject, mode, options.healthy_steps) for mode in OF_TINY_MODEL]
    sections = {subject.section: lines}
    if not options.only and subject.section == "Measured":
        sections[TRL_SECTION] = against_trl.table()
    for name, section in sections.items():
        sys.stdout.write("\n".join([*section, ""]))
        if options.results is not None:
            replace_section(options.results, name, section)


def rows_of(subject: Subject, is_chosen: Callable[[str], bool]) -> Iterator[Row]:
    faults = {name: fault for name, fault in (FAULTS | ALSO).items() if is_chosen(name)}
    modes = {fault.mode for fault in faults.values()}
    with (
        tempfile.TemporaryDirectory() as directory,
        sites(subject, Path(directory), modes) as by_mode,
    ):
        for name, fault in faults.items():
            found = []
            for late in (0, STALE) if fault.is_of_environment else (0,):
                target = Path(directory) / f"{name}-{late}"
                target.mkdir()
                outcome = run_with(fault, by_mode[fault.mode], target, batches_late=late)
                found.append(outcome.first(fault.named))
                sys.stderr.write(f"{name}, {late} steps old: {_when(fault, found[-1])}\n")
                if found[-1] is None:
                    sys.stderr.writelines(f"    {r.step}: {r.text}\n" for r in outcome.reports)
                shutil.rmtree(target)  # its checkpoints are as large as the model
            yield Row(name, fault, found)


def table(rows: Sequence[Row]) -> list[str]:
    """Lines of markdown."""
    named = [row for row in rows if row.name in FAULTS]
    return [
        f"{sum(row.is_caught for row in named)} of {len(named)} faults are caught, and "
        f"{sum(row.is_caught for row in rows if row.name in ALSO)} of {len(rows) - len(named)} "
        "further ones.",
        "",
        "| Fault | Injected | Caught on new data | Caught on old data | By |",
        "|---|---|---|---|---|",
        *("| " + " | ".join(row.cells()) + " |" for row in rows),
        "",
    ]


def healthy(subject: Subject, mode: str, steps: int) -> str:
    """Train without any fault; returns a line with the trainer's warnings."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        command = [sys.executable, "-m", "grpo_runs", "--mode", mode, "--steps", str(steps)]
        command += ["--run-dir", str(run), "--dtype", subject.dtype]
        command += subject.demo or OF_TINY_MODEL[mode]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        log = (run / "logs" / "trainer.log").read_text()
        taken = len((run / "metrics.jsonl").read_text().splitlines())
    warned = Counter(re.findall(r"\[warning +\] (\S+)", log))
    for known in KNOWN_WARNINGS:
        del warned[known]
    listed = ", ".join(f"{event} ({count})" for event, count in warned.items()) or "none"
    return f"Warnings in {taken:,} healthy steps of `{mode}`: {listed}.\n"


def _when(fault: Fault, report: Report | None) -> str:
    if report is None:
        return "no"
    if "SelfTestFailed" in report.text:
        return "before step 1"
    step = report.step + 1 - (FAULT_FROM if fault.is_of_environment else 0)
    return f"step {step}"


def _check(report: Report) -> str:
    """The name of the check or error. A quarantined batch is logged with its error first."""
    error = re.search(r"(?:^|'reason': ['\"])(\w+): ", report.text)
    check = re.search(r"'(?:check|reason)': '(\w+)'", report.text)
    event = re.search(r"'event': '([\w.]+)'", report.text)
    found = error or check or event
    assert found is not None
    return f"`{found[1]}`"


@contextmanager
def sites(subject: Subject, directory: Path, modes: set[str]) -> Iterator[dict[str, Site]]:
    model, exercise, dtype = subject.model, subject.exercise, subject.dtype
    with ExitStack() as stack:
        port = free_port()
        redis = start_redis(port, directory)
        stack.callback(redis.stop)
        redis_url = f"redis://127.0.0.1:{port}/0"
        api = start_run_api(redis_url, directory)
        stack.callback(api.process.stop)
        found = {}
        if SHARED in modes:
            flags = ("--dtype", dtype, "--redis-url", redis_url, "--run-id", "shared")
            server = start_inference(model, directory, *flags, *exercise.server_flags)
            stack.callback(stop_inference, server)
            found[SHARED] = stack.enter_context(shared_site(server, api.url, exercise))
        if LORA in modes:
            lora = directory / "lora"
            lora.mkdir()
            of_files = FILE_DTYPE if dtype == FLOAT32 else dtype
            adapters = lora_site(model, redis_url, api.url, lora, exercise, of_files)
            found[LORA] = stack.enter_context(adapters)
        yield found


if __name__ == "__main__":
    main()
