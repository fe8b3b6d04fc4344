"""Environments on unmodified verifiers run as tasks: with its newest version, and with the last one
that has `load_environment`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.compat.upstream_processes import installed, require_passes

pytestmark = pytest.mark.timeout(1800)  # the first use installs verifiers

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT, ROOT / "shared", ROOT / "services/environment")
OTHERS = {"mcp", "mcp-types", "openai"}
"""Packages of which verifiers accepts other versions than vLLM."""


@pytest.mark.parametrize(
    ("pins", "checks", "tier", "tests"),
    [
        ("verifiers.txt", "current.py", "not full", 17),
        pytest.param("verifiers.txt", "current.py", "full", 2, marks=pytest.mark.full),
        pytest.param("verifiers-classic.txt", "classic.py", "", 24, marks=pytest.mark.full),
    ],
)
def test_its_environments_run_as_tasks(
    pins: str, checks: str, tier: str, tests: int, tmp_path: Path
) -> None:
    python = installed(ROOT / "requirements" / pins).python
    command = [python, "-m", "pytest", f"--rootdir={ROOT}", "--noconftest", "-W", "ignore"]
    command += ["-m", tier]
    command += ["-p", "tests.unit.env.conftest", "-p", "tests.compat.bridge.both"]
    command += [ROOT / "tests/compat/bridge" / name for name in (checks, "both.py")]
    path = os.pathsep.join(map(str, SOURCES))
    require_passes(command, tests, tmp_path, PYTHONPATH=path)


@pytest.mark.parametrize("pins", ["verifiers.txt", "verifiers-classic.txt"])
def test_all_other_versions_are_those_of_the_project(pins: str) -> None:
    lists = ROOT / "requirements"
    ours, theirs = _versions(lists / "constraints.txt"), _versions(lists / pins)
    assert theirs["verifiers"]
    common = ours.keys() & theirs.keys() - OTHERS
    assert {name: theirs[name] for name in common} == {name: ours[name] for name in common}


def _versions(file: Path) -> dict[str, str]:
    lines = (line.partition("==") for line in file.read_text().splitlines() if "==" in line)
    return {name.lower().replace("_", "-"): version for name, _, version in lines}
