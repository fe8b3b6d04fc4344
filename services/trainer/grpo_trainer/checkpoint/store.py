"""Writes checkpoints completely, verifies them when they are read, and keeps the newest two.

Their names begin with a number that increases over all runs of a save path, so the name shows which
one is the newest.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from grpo_trainer.atomic_files import (
    make_directory,
    remove_directory,
    whole_directory,
    write_whole,
)
from grpo_trainer.checkpoint.state import FileFacts, StateRecord, TrainerState
from grpo_trainer.errors import DamagedState

STATES = "trainer_state"
RECORD, TENSORS = "trainer_state.json", "tensors.safetensors"
NEWEST_EPOCH = "newest_epoch"
KEPT = 2
_NAME = re.compile(r"(\d{6,})_step_\d+")


@dataclass(frozen=True)
class SavedState:
    """A checkpoint whose record was read. Its tensors are still on disk."""

    directory: Path
    record: StateRecord

    def load(self) -> TrainerState:
        """Load the tensors. Raises `DamagedState` if a file has changed since it was written."""
        problems = [
            problem
            for name, facts in self.record.files.items()
            if (problem := _problem(self.directory / name, facts))
        ]
        if problems:
            raise _damaged(self.directory, "; ".join(problems))
        try:
            return TrainerState(self.record, load_file(self.directory / TENSORS))
        except (OSError, SafetensorError) as error:
            raise _damaged(self.directory, f"cannot read {TENSORS}: {error}") from error


class StateStore:
    """Args: save_path: of the run; checkpoints are saved in a subdirectory."""

    def __init__(self, save_path: Path) -> None:
        self.directory = save_path / STATES

    def save(self, state: TrainerState) -> Path:
        """Write a checkpoint durably, then remove all but the newest two.

        Raises:
            CheckpointNotSaved: a file could not be written, e.g. the disk is full; earlier
                checkpoints are intact.
        """
        number = max(self._numbered(), default=0) + 1
        target = self.directory / f"{number:06}_step_{state.record.step}"
        with whole_directory(target) as directory:
            make_directory(self.directory)
            digest = write_tensors(state.tensors, directory / TENSORS)
            size_bytes = (directory / TENSORS).stat().st_size
            files = {TENSORS: FileFacts(size_bytes=size_bytes, sha256=digest)}
            _write_record(state.record.model_copy(update={"files": files}), directory)
        for _, path in sorted(self._numbered().items())[:-KEPT]:
            remove_directory(path)
        return target

    def newest(self) -> SavedState | None:
        """The newest checkpoint, if any. Raises `DamagedState` if its record cannot be read."""
        numbered = self._numbered()
        return read_state(numbered[max(numbered)]) if numbered else None

    def _numbered(self) -> dict[int, Path]:
        if not self.directory.is_dir():
            return {}
        found = ((_NAME.fullmatch(path.name), path) for path in self.directory.iterdir())
        return {int(match[1]): path for match, path in found if match}


def read_state(directory: Path) -> SavedState:
    """Raises `DamagedState` if the record cannot be read."""
    try:
        record = StateRecord.model_validate_json((directory / RECORD).read_bytes())
    except OSError as error:
        raise _damaged(directory, f"cannot read {RECORD}: {error}") from error
    except ValidationError as error:
        raise _damaged(directory, f"{RECORD} is invalid: {_problems_of(error)}") from error
    return SavedState(directory, record)


def _problems_of(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, found['loc'])) or 'JSON'}: {found['msg']}" for found in error.errors()
    )


def _write_record(record: StateRecord, directory: Path) -> None:
    (directory / RECORD).write_text(record.model_dump_json())


def _problem(path: Path, written: FileFacts) -> str | None:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        size_bytes = path.stat().st_size
    except OSError as error:
        return f"cannot read {path.name}: {error}"
    if size_bytes != written.size_bytes:
        return f"{path.name} has {size_bytes} bytes, but {written.size_bytes} were written"
    return (
        None
        if digest == written.sha256
        else f"the content of {path.name} has changed since the checkpoint was written"
    )


def _damaged(directory: Path, what: str) -> DamagedState:
    return DamagedState(
        f"{directory}: {what}. run-api has deleted the batches that this checkpoint includes. To "
        "resume without these batches from an older checkpoint, pass --resume DIRECTORY; to train "
        "from the start, pass `--resume never`"
    )


PART_BYTES = 64 << 20
"""Number of bytes copied to the host at a time."""
_ALIGNMENT = 8
_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
}


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> str:
    """Write a safetensors file in parts of bounded size; returns its SHA-256 in hexadecimal.

        8 bytes length of the header (little endian), header (JSON), the tensors' bytes without gaps

    The safetensors library would copy all tensors of a file to the host at once: for a checkpoint
    on a GPU, 12 bytes per weight.

    Args:
        tensors: on any device, of a floating type or uint8
    Raises:
        OSError: the file could not be written, e.g. the disk is full.
    """
    # The widest elements come first, so that each tensor begins at a multiple of its element size.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in _parts(ordered):
            digest.update(part)
            file.write(part)
    return digest.hexdigest()


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    described, begin = {}, 0
    for name, tensor in tensors.items():
        end = begin + tensor.nbytes
        described[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    yield _header(tensors)
    for tensor in tensors.values():
        for part in torch.split(tensor.detach().reshape(-1).view(torch.uint8), PART_BYTES):
            yield part.cpu().numpy().data


class OpenedEpochs:
    """The newest epoch that trainers of one save path have started.

    A checkpoint records the epoch at its time. A trainer may start another epoch and die before its
    next checkpoint. If the server then restarts too, only this file records that epoch.

    Args: save_path: of the run
    """

    def __init__(self, save_path: Path) -> None:
        self._path = save_path / STATES / NEWEST_EPOCH

    def newest(self) -> int:
        """The newest epoch, or 0."""
        return int(self._path.read_text()) if self._path.exists() else 0

    def open(self, epoch: int) -> None:
        """Record a new epoch durably, before its first publication.

        Raises:
            CheckpointNotSaved: it could not be written.
        """
        if epoch > self.newest():
            write_whole(self._path, str(epoch))
