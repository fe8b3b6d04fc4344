"""Directories are written and removed completely, by one trainer at a time."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from grpo_trainer import atomic_files
from grpo_trainer.atomic_files import (
    hold_save_path,
    pieces_of,
    remove_directory,
    whole_directory,
)
from grpo_trainer.errors import UnusableSavePath
from tests.support.directories import names


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the product catches it."""


@contextmanager
def killed_before_change(number: int | None) -> Iterator[list[str]]:
    """End the process just before its n-th change on disk; returns the changes so far."""
    changes: list[str] = []

    def unless_killed(change: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(target: Any, *others: Any, **options: Any) -> Any:
            if len(changes) == number:
                if change is shutil.rmtree and Path(target).exists():
                    next(Path(target).iterdir()).unlink()  # partly removed
                raise Killed
            changes.append(change.__name__)
            return change(target, *others, **options)

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        for place, name in ((os, "fsync"), (shutil, "rmtree"), (Path, "mkdir"), (Path, "rename")):
            patch.setattr(place, name, unless_killed(getattr(place, name)))
        yield changes


def write(target: Path, text: str) -> None:
    with whole_directory(target) as directory:
        for part in "ab":
            (directory / part).write_text(text)


def found(target: Path) -> list[str]:
    """The target's contents after the next trainer has started; no other file may exist."""
    with hold_save_path(target.parent):
        pass
    assert set(names(target.parent)) <= {".lock", target.name}
    return [(target / part).read_text() for part in "ab"] if target.exists() else []


@pytest.mark.parametrize(
    ("before", "change", "after"),
    [
        ([], lambda target: write(target, "new"), ["new", "new"]),
        (["old", "old"], lambda target: write(target, "new"), ["new", "new"]),
        (["old", "old"], remove_directory, []),
    ],
    ids=["write", "replace", "remove"],
)
def test_a_directory_is_whole_wherever_its_trainer_is_killed(
    before: list[str], change: Callable[[Path], None], after: list[str], tmp_path: Path
) -> None:
    outcomes = []
    for number in itertools.count():
        target = tmp_path / str(number) / "final_model"
        if before:
            write(target, before[0])
        try:
            with killed_before_change(number):
                change(target)
        except Killed:
            target.parent.mkdir(exist_ok=True)
            outcomes.append(found(target))
        else:
            assert found(target) == after
            break
    assert before in outcomes
    assert outcomes == sorted(outcomes, key=[before, after].index)  # raises on any other outcome


def test_files_are_on_the_disk_before_their_name_is(tmp_path: Path) -> None:
    with killed_before_change(None) as changes:
        write(tmp_path / "final_model", "new")
    renamed = changes.index("rename")
    assert changes[:renamed].count("fsync") == 3  # both files and their directory
    assert changes[renamed + 1] == "fsync"


def test_what_cannot_be_removed_stays_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory on NFS with a file that a process has open cannot be removed."""
    target = tmp_path / "000001_step_1"
    write(target, "old")
    remove = os.rmdir

    def refuse(path: Any, **options: Any) -> None:
        if str(path).endswith(".old"):
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        remove(path, **options)

    with structlog.testing.capture_logs() as logs:
        monkeypatch.setattr(os, "rmdir", refuse)
        assert remove_directory(target)
        with hold_save_path(tmp_path):
            assert not target.exists()
        assert [line["event"] for line in logs] == ["removal.failed"]
    monkeypatch.undo()
    assert found(target) == []


def test_one_trainer_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic_files, "LOCK_DEADLINE_S", 0.0)
    with (
        hold_save_path(tmp_path),
        pytest.raises(UnusableSavePath, match="another trainer uses this directory"),
        hold_save_path(tmp_path),
    ):
        pass
    with hold_save_path(tmp_path):
        pass


def test_a_tensor_comes_to_the_host_in_pieces_of_bounded_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(atomic_files, "PART_BYTES", 1000)
    weights = torch.arange(1001.0)
    pieces = [bytes(piece) for piece in pieces_of(weights)]
    assert max(map(len, pieces)) == 1000
    assert b"".join(pieces) == weights.numpy().tobytes()
