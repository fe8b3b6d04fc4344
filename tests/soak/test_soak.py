"""Everything that may die dies, again and again: every acknowledged group is trained exactly once.

Options come from the environment: `SOAK_SECONDS`, `SOAK_SEED`, `SOAK_APPENDFSYNC`, and
`SOAK_DIRECTORY` for what is kept. `make soak` sets them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.soak.cluster import Settings
from tests.soak.report import Report
from tests.soak.soak import run_soak

SECONDS = float(os.environ.get("SOAK_SECONDS", "60"))
_AROUND_IT_S = 3600.0
"""Start, drain and verdict, each of which gives up by itself before that."""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        directory=Path(os.environ.get("SOAK_DIRECTORY") or tmp_path),
        seconds=SECONDS,
        seed=int(os.environ.get("SOAK_SEED", "0")),
        appendfsync=os.environ.get("SOAK_APPENDFSYNC", "always"),
    )


@pytest.mark.timeout(SECONDS + _AROUND_IT_S)
def test_every_acknowledged_group_is_trained_exactly_once(
    settings: Settings, show: Callable[[Report], None]
) -> None:
    report = run_soak(settings)
    show(report)
    assert not report.problems
