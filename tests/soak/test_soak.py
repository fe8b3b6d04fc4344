"""Every process is killed again and again: each acknowledged group is trained exactly once.

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

SECONDS = float(os.environ.get("SOAK_SECONDS", "15"))
_AROUND_IT_S = 3600.0
"""For start, the last round, drain and verdict, each of which has a shorter deadline."""


@pytest.mark.timeout(SECONDS + _AROUND_IT_S)
def test_every_acknowledged_group_is_trained_exactly_once(
    tmp_path: Path, show: Callable[[Report], None]
) -> None:
    settings = Settings(
        directory=Path(os.environ.get("SOAK_DIRECTORY") or tmp_path),
        seconds=SECONDS,
        seed=int(os.environ.get("SOAK_SEED", "0")),
        appendfsync=os.environ.get("SOAK_APPENDFSYNC", "always"),
    )
    report = run_soak(settings)
    show(report)
    assert not report.problems
