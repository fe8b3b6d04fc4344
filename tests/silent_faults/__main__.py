"""Injects every fault into a real run, with and without receipts. Writes the tables of
docs/reference/silent-faults.md: one for each model, and one for each other system that the faults
are put into."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks.report import replace_section
from grpo_runs.process.ports import free_port
from tests.fixtures.inference import FILE_DTYPE, start_inference, stop_inference
from tests.fixtures.run_api import start_run_api
from tests.silent_faults import against_archived, against_trl
from tests.silent_faults.exercise import FLOAT32, Subject, subject_of
from tests.silent_faults.faults import ALSO, FAULTS, KEPT_KV, SHARED, Fault
from tests.silent_faults.producer import FAULT_FROM
from tests.silent_faults.runs import Outcome, Report, Site, lora_site, run_with, shared_site
from tests.support.redis_server import start_redis

STALE = 2
"""Steps between sampling and training in the runs on old data."""


@dataclass(frozen=True)
class Variant:
    """How a fault of the environment is run. `late`: steps between sampling and training"""

    title: str
    receipts: bool
    late: int


VARIANTS = (
    Variant("With receipts", True, 0),
    Variant("Without receipts, new data", False, 0),
    Variant("Without receipts, old data", False, STALE),
)


@dataclass(frozen=True)
class Result:
    """`named`: what named the cause; `noticed`: the first report if nothing did. None: nothing."""

    named: Report | None
    noticed: Report | None

    @classmethod
    def of(cls, outcome: Outcome, fault: Fault) -> Result:
        named = outcome.first(fault.named)
        noticed = outcome.reports[0] if named is None and outcome.reports else None
        return cls(named, noticed)

    @classmethod
    def read(cls, line: dict[str, dict[str, object] | None]) -> Result:
        return cls(*(found and Report(**found) for found in (line["named"], line["noticed"])))  # type: ignore[arg-type]

    def cell(self, fault: Fault) -> str:
        report = self.named or self.noticed
        if report is None:
            return "no"
        step = report.step + 1 - (FAULT_FROM if fault.is_of_environment else 0)
        when = f"step {step}" if step > 0 else "start"
        if self.named is None:
            return f"noticed at {when}, another cause"
        return "before step 1" if "SelfTestFailed" in report.text else when


@dataclass(frozen=True)
class Row:
    """`results`: of each variant; a fault that is no environment's has only the first one."""

    name: str
    fault: Fault
    results: list[Result]

    def cells(self, columns: int) -> list[str]:
        told = [result.cell(self.fault) for result in self.results]
        named = [result.named for result in self.results if result.named is not None]
        by = ", ".join(dict.fromkeys(map(_check, named)))
        repository, _, number = self.fault.thread.partition("#")
        link = f"[{self.name}](https://github.com/{repository}/issues/{number})"
        name = link if self.fault.thread else self.name
        return [name, self.fault.injected, *told, *[""] * (columns - len(told)), by]


class Results:
    """Of the runs that were made. Args: file: keeps them, so that a command that was interrupted
    makes only the others; None: kept in memory alone"""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        lines = file.read_text().splitlines() if file is not None and file.exists() else []
        self._found = {line["run"]: Result.read(line) for line in map(json.loads, lines)}

    def get(self, run: str, make: Callable[[], Result]) -> Result:
        if run not in self._found:
            self._found[run] = result = make()
            if self._file is not None:
                with self._file.open("a") as file:
                    file.write(json.dumps({"run": run, **asdict(result)}) + "\n")
        return self._found[run]


def main() -> None:
    parser = argparse.ArgumentParser(prog="make silent-faults", description=__doc__)
    parser.add_argument("--only", default="", help="faults whose name contains this text")
    parser.add_argument(
        "--model", default="", help="smollm2 or a directory; without: the tiny model"
    )
    parser.add_argument("--dtype", default=FLOAT32, choices=[FLOAT32, "bfloat16"])
    parser.add_argument("--against", choices=["trl", "archived"], help="try the faults there")
    parser.add_argument(
        "--variants", type=int, default=len(VARIANTS), help="runs of an environment's fault, of 3"
    )
    parser.add_argument("--state", type=Path, help="keeps results of runs, to continue later")
    parser.add_argument("--results", type=Path, help="page whose sections are replaced")
    options = parser.parse_args()
    chosen = {name: fault for name, fault in (FAULTS | ALSO).items() if options.only in name}
    subject = subject_of(options.model, options.dtype)
    if options.against is not None:
        other = {"trl": against_trl, "archived": against_archived}[options.against]
        section, lines = other.SECTION, other.table(chosen, options.state)
    else:
        section = subject.section
        variants = VARIANTS[: options.variants]
        rows = rows_of(subject, chosen, variants, Results(options.state))
        lines = table([*rows], variants)
    sys.stdout.write("\n".join([*lines, ""]))
    if options.results is not None:
        replace_section(options.results, section, lines)


def rows_of(
    subject: Subject, faults: dict[str, Fault], variants: Sequence[Variant], results: Results
) -> Iterator[Row]:
    with (
        tempfile.TemporaryDirectory() as directory,
        ExitStack() as stack,
    ):
        services = Services(subject, Path(directory), stack)
        for name, fault in faults.items():
            tried = variants if fault.is_of_environment else VARIANTS[:1]
            runs = {f"{name}, {variant.title}": variant for variant in tried}
            run = partial(_run, services, fault)
            yield Row(
                name, fault, [results.get(key, partial(run, key, v)) for key, v in runs.items()]
            )


def _run(services: Services, fault: Fault, name: str, variant: Variant) -> Result:
    late = variant.late if fault.is_of_environment else 0
    with tempfile.TemporaryDirectory() as target:  # its checkpoints are as large as the model
        outcome = run_with(fault, services.site(fault.mode), Path(target), late, variant.receipts)
    result = Result.of(outcome, fault)
    sys.stderr.write(f"{name}: {result.cell(fault)}\n")
    for report in outcome.reports if result.named is None else []:
        sys.stderr.write(f"    {report.step}: {report.text}\n")
    return result


def table(rows: Sequence[Row], variants: Sequence[Variant]) -> list[str]:
    """Lines of markdown."""
    titles = [variant.title for variant in variants]
    named = [row for row in rows if row.name in FAULTS]
    of_environment = [row for row in named if row.fault.is_of_environment]
    caught = sum(row.results[0].named is not None for row in named)
    by_numbers = [
        f"{sum(row.results[i].named is not None for row in of_environment)} {variant.title.lower()}"
        for i, variant in enumerate(variants)
    ]
    also = [row.results[0].named is not None for row in rows if row.name in ALSO]
    return [
        f"{caught} of {len(named)} faults are named, and {sum(also)} of {len(also)} further ones. "
        f"Of the {len(of_environment)} faults of environments and relays, the trainer names "
        f"{'; '.join(by_numbers)}.",
        "",
        f"| Fault | Injected | {' | '.join(titles)} | By |",
        "|---|---|" + "---|" * (len(titles) + 1),
        *("| " + " | ".join(row.cells(len(titles))) + " |" for row in rows),
        "",
    ]


def _check(report: Report) -> str:
    """The name of the check or error. A quarantined batch is logged with its error first."""
    error = re.search(r"(?:^|'reason': ['\"])(\w+): ", report.text)
    check = re.search(r"'(?:check|reason)': '(\w+)'", report.text)
    event = re.search(r"'event': '([\w.]+)'", report.text)
    found = error or check or event
    assert found is not None
    return f"`{found[1]}`"


class Services:
    """Redis, run-api and, as they are needed, a server for each mode. `stack`: stops them"""

    def __init__(self, subject: Subject, directory: Path, stack: ExitStack) -> None:
        self._subject, self._directory, self._stack = subject, directory, stack
        self._sites: dict[str, Site] = {}
        self._urls: tuple[str, str] | None = None

    def site(self, mode: str) -> Site:
        if mode not in self._sites:
            self._sites[mode] = self._stack.enter_context(self._opened(mode))
        return self._sites[mode]

    def _opened(self, mode: str) -> AbstractContextManager[Site]:
        subject, directory = self._subject, self._directory / mode
        redis_url, api_url = self._started()
        directory.mkdir()
        if mode == SHARED:
            return self._shared(redis_url, api_url, directory)
        dtype = FILE_DTYPE if subject.dtype == FLOAT32 else subject.dtype
        model, exercise, keeps_kv = subject.model, subject.exercise, mode == KEPT_KV
        return lora_site(model, redis_url, api_url, directory, exercise, dtype, keeps_kv)

    @contextmanager
    def _shared(self, redis_url: str, api_url: str, directory: Path) -> Iterator[Site]:
        subject = self._subject
        flags = ("--dtype", subject.dtype, "--redis-url", redis_url, "--run-id", "shared")
        server = start_inference(subject.model, directory, *flags, *subject.exercise.server_flags)
        try:
            with shared_site(server, api_url, subject.exercise) as site:
                yield site
        finally:
            stop_inference(server)

    def _started(self) -> tuple[str, str]:
        """URLs of Redis and of run-api."""
        if self._urls is None:
            port = free_port()
            redis = start_redis(port, self._directory)
            self._stack.callback(redis.stop)
            redis_url = f"redis://127.0.0.1:{port}/0"
            api = start_run_api(redis_url, self._directory)
            self._stack.callback(api.process.stop)
            self._urls = redis_url, api.url
        return self._urls


if __name__ == "__main__":
    main()
