"""Trainer states on disk: written whole, checked when read, the newest two kept.

Their names begin with a number that counts up over all runs that saved here, so that the newest is
known by its name alone.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from grpo_trainer.checkpoint.save_path import (
    make_directory,
    remove_directory,
    remove_unfinished,
    whole_directory,
)
from grpo_trainer.checkpoint.state import FileFacts, StateRecord, TrainerState
from grpo_trainer.checkpoint.tensor_file import write_tensors
from grpo_trainer.errors import DamagedState

STATES = "trainer_state"
RECORD, TENSORS = "trainer_state.json", "tensors.safetensors"
KEPT = 2
_NAME = re.compile(r"(\d{6,})_step_\d+")


@dataclass(frozen=True)
class SavedState:
    """A state whose record was read; its tensors are still on disk."""

    directory: Path
    record: StateRecord

    def load(self) -> TrainerState:
        """Raises `DamagedState` where a file is not what was written."""
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
            raise _damaged(self.directory, f"{TENSORS}: {error}") from error


class StateStore:
    """Args: save_path: of the run; states lie in a folder of it."""

    def __init__(self, save_path: Path) -> None:
        self.directory = save_path / STATES

    def remove_unfinished(self) -> None:
        """What a trainer left behind that was killed. For the one who holds the save path."""
        remove_unfinished(self.directory)

    def save(self, state: TrainerState) -> Path:
        """Make it durable, then let go of all but the newest two.

        Raises:
            CheckpointNotSaved: the disk is full, or the like; the states before are intact.
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
        """Raises `DamagedState` where its record cannot be read."""
        numbered = self._numbered()
        return read_state(numbered[max(numbered)]) if numbered else None

    def _numbered(self) -> dict[int, Path]:
        if not self.directory.is_dir():
            return {}
        found = ((_NAME.fullmatch(path.name), path) for path in self.directory.iterdir())
        return {int(match[1]): path for match, path in found if match}


def read_state(directory: Path) -> SavedState:
    """Raises `DamagedState` where its record cannot be read."""
    try:
        record = StateRecord.model_validate_json((directory / RECORD).read_bytes())
    except (OSError, ValidationError) as error:
        raise _damaged(directory, f"{RECORD}: {error}") from error
    return SavedState(directory, record)


def _write_record(record: StateRecord, directory: Path) -> None:
    (directory / RECORD).write_text(record.model_dump_json())


def _facts(path: Path) -> FileFacts:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileFacts(size_bytes=path.stat().st_size, sha256=digest)


def _problem(path: Path, written: FileFacts) -> str | None:
    try:
        found = _facts(path)
    except OSError as error:
        return f"{path.name}: {error}"
    if found.size_bytes != written.size_bytes:
        return f"{path.name}: {found.size_bytes} bytes, {written.size_bytes} were written"
    return None if found == written else f"{path.name}: other bytes than were written"


def _damaged(directory: Path, what: str) -> DamagedState:
    return DamagedState(
        f"{directory}: {what}. The batches up to this state are acknowledged and will not come "
        "again; an older state can only go on without those that followed it: name it with "
        "--resume <directory>, or train from the start with --resume never"
    )
