"""Shows the table of a soak at the end, whether it passed or failed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.soak.report import Report

_REPORTS = pytest.StashKey[list[Report]]()


@pytest.fixture
def show(request: pytest.FixtureRequest) -> Callable[[Report], None]:
    return request.config.stash.setdefault(_REPORTS, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.config.stash.get(_REPORTS, []):
        terminalreporter.write_sep("=", "soak")
        terminalreporter.write_line(str(report))
