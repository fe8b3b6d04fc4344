from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from grpo_local.run_directory import RunDirectoryUnusable, create_run_directory, default_name


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_default_name_is_utc_time_and_seed() -> None:
    assert default_name(datetime(2025, 1, 31, 23, 59, 58, tzinfo=UTC), 7) == "20250131T235958Z-7"


def test_latest_follows_runs_in_the_default_place_only() -> None:
    create_run_directory(None, seed=3)
    second = create_run_directory(Path("runs/second"), seed=3)
    create_run_directory(Path("elsewhere/third"), seed=3)
    assert Path("runs/latest").resolve() == second.path.resolve()
    assert not Path("elsewhere/latest").exists()
    assert sorted(path.name for path in Path("runs").iterdir())[1:] == ["latest", "second"]


def test_an_earlier_run_is_not_overwritten() -> None:
    run = create_run_directory(Path("run"), seed=0)
    run.metrics.write_text("precious")
    with pytest.raises(RunDirectoryUnusable, match="holds an earlier run"):
        create_run_directory(Path("run"), seed=0)


def test_a_real_directory_named_latest_is_left_alone() -> None:
    Path("runs/latest").mkdir(parents=True)
    with pytest.raises(RunDirectoryUnusable, match="not a symbolic link"):
        create_run_directory(None, seed=0)


def test_a_dangling_latest_is_replaced() -> None:
    Path("runs").mkdir()
    Path("runs/latest").symlink_to("gone")
    run = create_run_directory(None, seed=0)
    assert Path("runs/latest").resolve() == run.path.resolve()
