"""The tests that atroposlib ships for its own server pass on ours, unmodified."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.upstream_install import Upstream
from tests.compat.upstream_processes import SCRIPTS, require_passes

pytestmark = pytest.mark.timeout(1800)  # the first use installs atroposlib

MODULES = ("test_api_legacy.py", "test_api_compression.py", "test_api_messages_handling.py")
TESTS = 36


def test_they_pass(upstream: Upstream, clean_run_api: str, tmp_path: Path) -> None:
    tests = next(upstream.python.parents[1].glob("lib/python*/site-packages/atroposlib/tests"))
    command = [upstream.python, "-m", "pytest", "-p", "redirect", *(tests / m for m in MODULES)]
    variables = {"PYTHONPATH": str(SCRIPTS), "RUN_API_URL": clean_run_api}
    require_passes(command, TESTS, tmp_path, **variables)
