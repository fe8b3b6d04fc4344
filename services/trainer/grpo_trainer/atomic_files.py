"""Writes directories completely or not at all, and locks --save-path for one trainer.

A directory is written under a temporary name and synced to disk. Then it is renamed, and the rename
is synced. So after a kill or a power cut, every directory with a final name is complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING

import structlog
from safetensors import SafetensorError

from grpo_core.deadline import Deadline
from grpo_trainer.errors import CheckpointNotSaved, UnusableSavePath

if TYPE_CHECKING:  # some commands that write files start without torch
    from torch import Tensor

log = structlog.get_logger()

LOCK = ".lock"
LOCK_DEADLINE_S = 5.0
"""Time for a trainer that was just killed to release the lock."""
_LOCK_POLL_S = 0.1
_NEW, _FORMER, _OLD, _PART = ".new", ".former", ".old", ".part"
"""Suffixes of hidden names: a directory being written, being replaced and being removed; a file
being written."""


@contextlib.contextmanager
def hold_save_path(save_path: Path) -> Iterator[None]:
    """Lock the directory against other trainers, and check before the first step that it can be
    written.

    Raises:
        UnusableSavePath: it cannot be written, or another trainer uses it.
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
                    f"--save-path {save_path}: another trainer uses this directory; stop that "
                    "trainer, or choose another directory for this run"
                ) from None
            time.sleep(_LOCK_POLL_S)
        except OSError as error:
            log.warning(
                "save_path.lock_failed",
                save_path=str(save_path),
                reason=str(error),
                hint="make sure that no other trainer uses this directory",
            )
            return


@contextlib.contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory to write into. If the block succeeds, the directory replaces
    `target`.

    Raises:
        CheckpointNotSaved: a file could not be written; `target` is unchanged.
    """
    staging = _hidden(target, _NEW)
    try:
        _remove(staging)
        staging.mkdir(parents=True)
        yield staging
        for path in staging.rglob("*"):
            _sync(path, os.O_RDONLY | (os.O_DIRECTORY if path.is_dir() else 0))
        _sync_directory(staging)
        _replace(target, staging)
    except (OSError, SafetensorError) as error:
        _remove(staging)
        raise CheckpointNotSaved(
            f"{target} could not be written: {error}; free disk space or choose another "
            "--save-path, then start the trainer again"
        ) from error


def write_whole(target: Path, text: str) -> None:
    """Write a file completely or not at all, replacing `target`.

    Raises:
        CheckpointNotSaved: the file could not be written; `target` is unchanged.
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
            f"{target} could not be written: {error}; free disk space, or choose another "
            "directory, then start the trainer again"
        ) from error


def make_directory(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    _sync_directory(path.parent)


def remove_directory(target: Path) -> bool:
    """Remove a directory that is not needed any more. It is renamed first, so its name never refers
    to a part of it. A failure is logged once. Returns whether the name is free."""
    old = _hidden(target, _OLD)
    _remove(old)
    try:
        target.rename(old)
    except OSError as error:
        _log_kept(target, str(error))
        return False
    _remove(old)
    return True


def remove_file(path: Path) -> None:
    """Remove a file that is not needed any more. A failure is logged once."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log_kept(path, str(error))


def remove_unfinished(parent: Path) -> None:
    """Remove unfinished files and directories of a trainer that was killed."""
    for part in parent.glob(f".*{_PART}"):
        remove_file(part)
    for suffix in (_NEW, _OLD):
        for path in parent.glob(f".*{suffix}"):
            _remove(path)
    for former in parent.glob(f".*{_FORMER}"):
        target = former.with_name(former.name.removeprefix(".").removesuffix(_FORMER))
        if target.exists():
            _remove(former)
        else:  # the trainer died while replacing it
            former.rename(target)


def _replace(target: Path, staging: Path) -> None:
    """Replace `target` by `staging`. A complete directory exists at every moment."""
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
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass
    except OSError as error:  # e.g. NFS keeps a file that a process has open, as `.nfs...`
        shutil.rmtree(path, ignore_errors=True)  # all that can be removed
        _log_kept(path, str(error))


@functools.cache
def _log_kept(path: Path, reason: str) -> None:
    log.warning(
        "removal.failed",
        path=str(path),
        reason=reason,
        hint="training continues; remove it by hand, it only takes disk space",
    )


def _sync_directory(directory: Path) -> None:
    """Sync the names in a directory to disk, which a sync of the files does not do."""
    _sync(directory, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


PART_BYTES = 64 << 20
"""Number of bytes copied to the host at a time."""
_ALIGNMENT = 8
DTYPES = {
    "torch.float32": "F32",
    "torch.bfloat16": "BF16",
    "torch.float16": "F16",
    "torch.uint8": "U8",
}


def write_tensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> str:
    """Write a safetensors file to disk in parts of bounded size; returns its SHA-256 in
    hexadecimal.

        8 bytes length of the header (little endian), header (JSON), the tensors' bytes without gaps

    The safetensors library would copy all tensors of a file to the host at once: for a checkpoint
    on a GPU, 12 bytes per weight.

    Args:
        tensors: on any device, of a floating type or uint8
        metadata: of the file

    Raises:
        OSError: the file could not be written, e.g. the disk is full.
    """
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in _parts(tensors, metadata):
            digest.update(part)
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _parts(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None
) -> Iterator[bytes | memoryview]:
    # The widest elements come first, so that each tensor begins at a multiple of its element size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPES[str(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield struct.pack("<Q", len(text)) + text
    for _, tensor in ordered:
        yield from pieces_of(tensor)


def pieces_of(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in order, each piece in host memory until the next one is taken."""
    import torch

    whole = tensor.detach().reshape(-1).view(torch.uint8)
    # A GPU copies into pinned memory several times as fast.
    pinned = torch.empty(PART_BYTES, dtype=torch.uint8, pin_memory=True) if whole.is_cuda else None
    for part in torch.split(whole, PART_BYTES):
        host = part if pinned is None else pinned[: len(part)].copy_(part)
        yield host.numpy().data
