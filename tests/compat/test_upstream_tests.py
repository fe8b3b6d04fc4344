"""The tests that atroposlib ships for its own server pass on ours, unmodified."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.compat.upstream_install import Upstream
from tests.compat.upstream_processes import SCRIPTS

pytestmark = pytest.mark.timeout(1800)  # the first use installs atroposlib

MODULES = ("test_api_legacy.py", "test_api_compression.py", "test_api_messages_handling.py")
TESTS = 36
DEADLINE_S = 300


def test_they_pass(upstream: Upstream, clean_run_api: str, tmp_path: Path) -> None:
    tests = next(upstream.python.parents[1].glob("lib/python*/site-packages/atroposlib/tests"))
    report = tmp_path / "report.xml"
    done = subprocess.run(
        [
            *(str(upstream.python), "-m", "pytest", "-p", "redirect", "-p", "no:cacheprovider"),
            f"--junitxml={report}",
            *(str(tests / module) for module in MODULES),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SCRIPTS), "RUN_API_URL": clean_run_api},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout
    suite = ElementTree.parse(report).find("testsuite")
    assert suite is not None
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": TESTS, "failures": 0, "errors": 0, "skipped": 0}
