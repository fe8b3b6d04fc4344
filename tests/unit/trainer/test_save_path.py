from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from grpo_trainer import save_path
from grpo_trainer.errors import CheckpointNotSaved, UnusableSavePath
from grpo_trainer.save_path import hold_save_path, remove_directory, whole_directory


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """The kernel refuses to let a file grow, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def write(target: Path, text: str) -> None:
    with whole_directory(target) as directory:
        (directory / "file").write_text(text)


def test_a_place_that_cannot_be_written_is_told_before_the_first_step(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    with pytest.raises(UnusableSavePath, match="--save-path"), hold_save_path(in_the_way / "below"):
        pass
    with hold_save_path(tmp_path / "a" / "b"):
        pass
    assert names(tmp_path / "a" / "b") == [".lock"]


def test_one_trainer_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_path, "LOCK_DEADLINE_S", 0.2)
    with (
        hold_save_path(tmp_path),
        pytest.raises(UnusableSavePath, match="another trainer saves there"),
        hold_save_path(tmp_path),
    ):
        pass
    with hold_save_path(tmp_path):
        pass


def test_what_is_written_replaces_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "final_model"
    for text in ("first", "second"):
        write(target, text)
        assert (target / "file").read_text() == text
        assert names(tmp_path) == ["final_model"]


def test_a_disk_that_takes_no_more_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "final_model"
    write(target, "first")
    with (
        files_of_at_most(1000),
        pytest.raises(CheckpointNotSaved, match=r"could not be written: .* make room"),
    ):
        write(target, "x" * 2000)
    assert (target / "file").read_text() == "first"
    assert names(tmp_path) == ["final_model"]


def test_what_was_cut_off_is_cleared_away(tmp_path: Path) -> None:
    """Killed while writing, between the two renames of a replacement, after it, and removing."""
    for name in (".a.new", ".b.former", ".c.former", "c", ".d.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    with hold_save_path(tmp_path):
        pass
    assert names(tmp_path) == [".lock", "b", "c"]
    assert (tmp_path / "b" / "file").read_text() == ".b.former"
    assert (tmp_path / "c" / "file").read_text() == "c"
    remove_directory(tmp_path / "c")
    assert names(tmp_path) == [".lock", "b"]
