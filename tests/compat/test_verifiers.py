"""Environments on unmodified verifiers run as tasks: with its newest version, and with the last one
that has `load_environment`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.compat.upstream_install import NoPackageIndex, ensure_python

pytestmark = pytest.mark.timeout(1800)  # the first use installs verifiers

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT, ROOT / "shared", ROOT / "services/environment")
OTHERS = {"mcp", "mcp-types", "openai"}
"""Packages of which verifiers accepts other versions than vLLM."""
DEADLINE_S = 400


@pytest.mark.parametrize(
    ("pins", "checks", "tests"),
    [
        ("verifiers.txt", "current.py", 18),
        pytest.param("verifiers-classic.txt", "classic.py", 24, marks=pytest.mark.full),
    ],
)
def test_its_environments_run_as_tasks(pins: str, checks: str, tests: int, tmp_path: Path) -> None:
    try:
        python = ensure_python(ROOT / "requirements" / pins)
    except NoPackageIndex as error:
        pytest.skip(f"no package index: {error}")
    report = tmp_path / "report.xml"
    done = subprocess.run(
        [
            *(python, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider", "-W", "ignore"),
            *("-p", "tests.unit.env.conftest", f"--junitxml={report}"),
            *(ROOT / "tests/compat/bridge" / name for name in (checks, "tokens.py")),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, SOURCES))},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout
    suite = ElementTree.parse(report).find("testsuite")
    assert suite is not None
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": tests, "failures": 0, "errors": 0, "skipped": 0}


@pytest.mark.parametrize("pins", ["verifiers.txt", "verifiers-classic.txt"])
def test_all_other_versions_are_those_of_the_project(pins: str) -> None:
    ours, theirs = _versions(ROOT / "constraints.txt"), _versions(ROOT / "requirements" / pins)
    assert theirs["verifiers"]
    common = ours.keys() & theirs.keys() - OTHERS
    assert {name: theirs[name] for name in common} == {name: ours[name] for name in common}


def _versions(file: Path) -> dict[str, str]:
    lines = (line.partition("==") for line in file.read_text().splitlines() if "==" in line)
    return {name.lower().replace("_", "-"): version for name, _, version in lines}
