"""A file that is there as long as the environment works."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_env.ready_file import ReadyFileNotWritten, there_meanwhile


def test_it_is_there_meanwhile_and_gone_after_a_failure_too(tmp_path: Path) -> None:
    path = tmp_path / "ready"
    path.touch()  # left behind by a killed process

    def fail() -> None:
        with there_meanwhile(path):
            assert path.exists()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not path.exists()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "ready"
    with (
        pytest.raises(ReadyFileNotWritten, match=r"--env.ready-file .*missing.*name a file that"),
        there_meanwhile(path),
    ):
        pass
