"""The directory that a run saves into: one trainer at a time, whole directories or none.

A directory is written under another name, every file synced to the disk, then renamed, then the
rename synced. So whatever is killed when, by a power cut too, a name stands for something whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import structlog
from safetensors import SafetensorError

from grpo_core.deadline import Deadline
from grpo_trainer.errors import CheckpointNotSaved, UnusableSavePath

log = structlog.get_logger()

LOCK = ".lock"
LOCK_DEADLINE_S = 5.0
"""A trainer that was just killed may need a moment to be gone."""
_LOCK_POLL_S = 0.1
_NEW, _FORMER, _OLD, _PART = ".new", ".former", ".old", ".part"
"""Ends of hidden names: being written, being replaced, being removed; a file that is being
written."""


@contextlib.contextmanager
def hold_save_path(save_path: Path) -> Iterator[None]:
    """Find out before the first step whether the last one will have where to go, and keep others
    out as long as the context is open.

    Raises:
        UnusableSavePath: it cannot be written, or another trainer saves there.
    """
    try:
        make_directory(save_path)
        lock = (save_path / LOCK).open("w")
    except OSError as error:
        raise not_writable(save_path, error) from error
    with lock:
        _take(lock, save_path)
        remove_unfinished(save_path)
        yield


def not_writable(save_path: Path, error: OSError) -> UnusableSavePath:
    return UnusableSavePath(
        f"--save-path {save_path}: {error}; choose a directory that uid {os.getuid()} can write, "
        f"or give it to that user: chown -R {os.getuid()}:{os.getgid()} DIRECTORY"
    )


def _take(lock: IO[str], save_path: Path) -> None:
    deadline = Deadline(LOCK_DEADLINE_S)
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if deadline.has_passed:
                raise UnusableSavePath(
                    f"--save-path {save_path}: another trainer saves there; end it, or choose a "
                    "directory of its own for each run"
                ) from None
            time.sleep(_LOCK_POLL_S)
        except OSError as error:
            log.warning(
                "this file system cannot tell whether another trainer saves here",
                save_path=str(save_path),
                reason=str(error),
            )
            return


@contextlib.contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """An empty directory to write into. When the block ends well it becomes `target`, in place of
    what was there.

    Raises:
        CheckpointNotSaved: something could not be written; what was at `target` still is.
    """
    staging = _hidden(target, _NEW)
    try:
        _remove(staging)
        staging.mkdir(parents=True)
        yield staging
        _sync_tree(staging)
        _replace(target, staging)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            _remove(staging)
        raise CheckpointNotSaved(
            f"{target} could not be written: {error}; make room or choose another --save-path, "
            "then start the trainer again: it goes on from the last state that it saved"
        ) from error


def write_whole(target: Path, text: str) -> None:
    """A file that is there whole or not at all, in place of what was there.

    Raises:
        CheckpointNotSaved: it could not be written; what was at `target` still is.
    """
    part = _hidden(target, _PART)
    try:
        make_directory(target.parent)
        part.write_text(text, encoding="utf-8")
        _sync(part, os.O_RDONLY)
        part.replace(target)
        _sync_directory(target.parent)
    except OSError as error:
        raise CheckpointNotSaved(
            f"{target} could not be written: {error}; make room, or choose another place for it, "
            "then start the trainer again"
        ) from error


def make_directory(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    _sync_directory(path.parent)


def remove_directory(target: Path) -> None:
    """At no moment is half of it there under its name."""
    old = _hidden(target, _OLD)
    _remove(old)
    target.rename(old)
    _remove(old)


def remove_unfinished(parent: Path) -> None:
    """What a trainer that was killed left behind in the middle of writing or removing."""
    for part in parent.glob(f".*{_PART}"):
        part.unlink()
    for suffix in (_NEW, _OLD):
        for path in parent.glob(f".*{suffix}"):
            _remove(path)
    for former in parent.glob(f".*{_FORMER}"):
        target = former.with_name(former.name.removeprefix(".").removesuffix(_FORMER))
        if target.exists():
            _remove(former)
        else:  # it was about to be replaced
            former.rename(target)


def _replace(target: Path, staging: Path) -> None:
    """At every moment one whole directory is there, under its name or beside it."""
    former = _hidden(target, _FORMER)
    _remove(former)
    if target.exists():
        target.rename(former)
    staging.rename(target)
    _sync_directory(target.parent)
    _remove(former)


def _hidden(target: Path, suffix: str) -> Path:
    return target.with_name(f".{target.name}{suffix}")


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def _sync_tree(directory: Path) -> None:
    for path in directory.rglob("*"):
        _sync(path, os.O_RDONLY | (os.O_DIRECTORY if path.is_dir() else 0))
    _sync_directory(directory)


def _sync_directory(directory: Path) -> None:
    """Names in a directory are on the disk only once the directory itself is synced."""
    _sync(directory, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
