"""The line of checkpoints: what the trainer has trained and will still have trained tomorrow.

`line.jsonl` grows by the batches of each checkpoint; `checkpoint.json` says how much of it counts.
What a killed trainer wrote beyond that is cut off when the next one starts, as the updates that a
real trainer made after its last checkpoint are gone with it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

_LINE, _CHECKPOINT = "line.jsonl", "checkpoint.json"


class TrainedBatch(BaseModel):
    """One step of the trainer: the digests of the groups that it trained on."""

    id: int
    digests: list[str]


class Checkpoint(BaseModel):
    """`line_bytes`: how much of the line belongs to it."""

    step: int = 0
    batch_id: int = 0
    line_bytes: int = 0


class TrainedLine:
    """Args: directory: where checkpoint and line lie; made where it is not there."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self.checkpoint = read_checkpoint(directory)
        path = directory / _LINE
        path.touch()
        os.truncate(path, self.checkpoint.line_bytes)

    def save(self, batches: Sequence[TrainedBatch]) -> None:
        """Durable when this returns, and either all of it or nothing where it does not."""
        added = b"".join(batch.model_dump_json().encode() + b"\n" for batch in batches)
        _write_durably(self._directory / _LINE, "ab", added)
        before = self.checkpoint
        after = Checkpoint(
            step=before.step + len(batches),
            batch_id=batches[-1].id,
            line_bytes=before.line_bytes + len(added),
        )
        temporary = self._directory / f"{_CHECKPOINT}.new"
        _write_durably(temporary, "wb", after.model_dump_json().encode())
        temporary.rename(self._directory / _CHECKPOINT)
        _sync_directory(self._directory)
        self.checkpoint = after


def read_checkpoint(directory: Path) -> Checkpoint:
    """The last one, or the beginning of a run."""
    path = directory / _CHECKPOINT
    return Checkpoint.model_validate_json(path.read_text()) if path.exists() else Checkpoint()


def read_line(directory: Path) -> list[TrainedBatch]:
    """What counts of the line."""
    size = read_checkpoint(directory).line_bytes
    if not size:
        return []
    content = (directory / _LINE).read_bytes()[:size]
    return [TrainedBatch.model_validate_json(line) for line in content.splitlines()]


def _write_durably(path: Path, mode: str, content: bytes) -> None:
    with path.open(mode) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
