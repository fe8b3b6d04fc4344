from __future__ import annotations

from pathlib import Path

import pytest

from grpo_local.run_directory import RunDirectoryUnusable, create_run_directory


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_latest_follows_runs_in_the_default_place_only() -> None:
    create_run_directory(None, seed=3)
    second = create_run_directory(Path("runs/second"), seed=3)
    create_run_directory(Path("elsewhere/third"), seed=3)
    assert Path("runs/latest").resolve() == second.path.resolve()
    assert not Path("elsewhere/latest").exists()
    assert sorted(path.name for path in Path("runs").iterdir())[1:] == ["latest", "second"]


def test_a_real_directory_named_latest_is_left_alone() -> None:
    Path("runs/latest").mkdir(parents=True)
    with pytest.raises(RunDirectoryUnusable, match="not a symbolic link"):
        create_run_directory(None, seed=0)


def test_a_dangling_latest_is_replaced() -> None:
    Path("runs").mkdir()
    Path("runs/latest").symlink_to("gone")
    run = create_run_directory(None, seed=0)
    assert Path("runs/latest").resolve() == run.path.resolve()
