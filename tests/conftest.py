"""Fixtures live in `tests/fixtures/`, one file per service."""

from __future__ import annotations

import os

import pytest

pytest_plugins = ["tests.fixtures.inference", "tests.fixtures.redis", "tests.fixtures.run_api"]

EXCUSED_SKIPS = ("no GPU",)
"""Starts of reasons that CI cannot do anything about. Any other skip there is a failure."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not (report.skipped and os.environ.get("CI") == "true"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not reason.removeprefix("Skipped: ").startswith(EXCUSED_SKIPS):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI, which could have run it: {reason}"
