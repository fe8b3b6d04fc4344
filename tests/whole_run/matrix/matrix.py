"""The list of all faults, their recorded results, and the page that shows both."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.report import replace_section
from tests.whole_run.matrix import endings, links, processes
from tests.whole_run.matrix.declared import Fault, Kind
from tests.whole_run.matrix.whole_run import GOES_ON
from tests.whole_run.table import KILLS

RESULTS = Path(__file__).with_name("results.json")
ELSEWHERE = Path(__file__).with_name("elsewhere.tsv")
"""Faults that other tests inject, and those that need hardware which nobody ran."""


def _elsewhere() -> Iterator[Fault]:
    test = "tests/whole_run/faults/test_killed_processes.py::test_the_run_goes_on_after_a_kill"
    for kill in KILLS:
        tests = (f"{test}[{kill.case}]",)
        yield Fault(Kind.PROCESS, str(kill), "SIGKILL", tests=tests, happens=GOES_ON)
    for line in ELSEWHERE.read_text().splitlines()[1:]:
        kind, name, injected, happens, error, test = line.split("\t")
        tests = (test,) if test else ()
        yield Fault(Kind[kind], name, injected, tests=tests, happens=happens, error=error)


FAULTS = (*links.faults(), *processes.faults(), *endings.faults(), *_elsewhere())
HEAD = (
    "| Fault | Injected | What happens | Logged | Seconds | Test |",
    "|---|---|---|---|---|---|",
)


def chosen(pattern: str, seed: str) -> list[Fault]:
    """Faults that this program injects. With a seed in its order, but those of one run together:
    a run takes half a minute to start."""
    found = [
        fault for fault in FAULTS if fault.inject is not None and re.search(pattern, fault.name)
    ]
    if seed:
        random.Random(seed).shuffle(found)
        modes = list(dict.fromkeys(fault.mode for fault in found))
        found.sort(key=lambda fault: modes.index(fault.mode))
    return found


def run_tests(pattern: str, directory: Path) -> dict[str, dict[str, Any]]:
    """Run the tests of other suites that inject a fault; records what they took."""
    faults = [fault for fault in FAULTS if fault.tests and re.search(pattern, fault.name)]
    report = directory / "report.xml"
    wanted = [test for fault in faults for test in fault.tests]
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *wanted]
    subprocess.run([*command, f"--basetemp={directory / 'tests'}"], check=False)
    cases = list(ElementTree.parse(report).iter("testcase"))
    found: dict[str, dict[str, Any]] = {}
    for fault in faults:
        names = [test.partition("::")[2] for test in fault.tests]
        own = [case for case in cases if _is_of(str(case.get("name")), names)]
        problems = {child.tag for case in own for child in case} & {"failure", "error", "skipped"}
        seconds = round(max(float(case.get("time", 0.0)) for case in own), 1)
        result = {"happened": fault.happens, "error": fault.error, "seconds": seconds}
        found[fault.name] = {"failed": True} if problems else result
    return found


def _is_of(case: str, tests: list[str]) -> bool:
    """Whether it is one of these tests, or of their parameters."""
    return case in tests or case.partition("[")[0] in tests


def recorded() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text())
    return found


def record(found: dict[str, dict[str, Any]]) -> None:
    """Merge new results into those that are recorded; a fault that is declared no more goes."""
    merged = recorded() | found
    known = {fault.name: merged[fault.name] for fault in FAULTS if fault.name in merged}
    lines = [json.dumps({n: result}, ensure_ascii=False)[1:-1] for n, result in known.items()]
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def sections() -> Iterator[tuple[str, list[str]]]:
    """A table for each kind of fault, under its heading."""
    results = recorded()
    for kind in Kind:
        faults = [fault for fault in FAULTS if fault.kind is kind]
        yield str(kind), [*HEAD, *(_row(fault, results.get(fault.name, {})) for fault in faults)]


def write_page(page: Path) -> None:
    for name, lines in sections():
        replace_section(page, name, lines)


def _row(fault: Fault, result: dict[str, Any]) -> str:
    test = ", ".join(f"`{test.removeprefix('tests/')}`" for test in fault.tests)
    cells = [
        fault.name,
        fault.injected,
        "failed" if "failed" in result else result.get("happened", fault.happens or "not run"),
        result.get("error", fault.error),
        str(result.get("seconds", "")),
        test or ("`make faults-matrix`" if fault.inject else "none"),
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
