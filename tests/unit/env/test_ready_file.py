"""A file that is there as long as the environment works."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_env.ready_file import ReadyFileNotWritten, there_meanwhile


def test_it_is_there_meanwhile_and_gone_after_a_failure_too(tmp_path: Path) -> None:
    path = tmp_path / "ready"

    def fail() -> None:
        with there_meanwhile(path):
            assert path.exists()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not path.exists()


def test_one_that_was_left_behind_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "ready"
    path.touch()
    with there_meanwhile(path):
        assert path.exists()
    assert not path.exists()


def test_none_is_none() -> None:
    with there_meanwhile(None):
        pass


def test_one_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "ready"
    with (
        pytest.raises(ReadyFileNotWritten, match=r"--env.ready-file .*missing.*name a file that"),
        there_meanwhile(path),
    ):
        pass
