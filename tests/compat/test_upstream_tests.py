"""The tests that atroposlib ships for its own server pass on ours, unmodified."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.upstream_processes import SCRIPTS, require_passed

pytestmark = pytest.mark.timeout(1800)  # the first use installs atroposlib

MODULES = ("test_api_legacy.py", "test_api_compression.py", "test_api_messages_handling.py")
TESTS = 36


def test_they_pass(upstream: Path, clean_run_api: str, tmp_path: Path) -> None:
    tests = next(upstream.parents[1].glob("lib/python*/site-packages/atroposlib/tests"))
    words = ["-p", "redirect", "--rootdir", tmp_path, "-c", "/dev/null"]
    words += [tests / module for module in MODULES]
    require_passed(upstream, words, [SCRIPTS], tmp_path, TESTS, RUN_API_URL=clean_run_api)
