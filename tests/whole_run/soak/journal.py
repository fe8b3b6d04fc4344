"""Journals of the soak's processes: one JSON object per line, append-only.

A process continues only after it has written a line, so SIGKILL loses no line.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, TypeAdapter

from grpo_core.closing import ClosesOnExit
from tests.whole_run.soak.hits import ENVIRONMENTS, TRAINER


class Outcome(StrEnum):
    ACKNOWLEDGED = "acknowledged"
    """run-api answered 2xx."""
    REFUSED = "refused"
    """run-api answered 4xx, as expected."""
    UNANSWERED = "unanswered"
    """The environment stopped waiting, or was killed, before the answer."""


class Started(BaseModel):
    """A process started its journal. From now on it exits cleanly on SIGTERM."""

    pid: int


class Joined(BaseModel):
    """The environment is registered under this id; None: it has disconnected."""

    env_id: int | None
    run_uuid: str = ""


class Sent(BaseModel):
    """Groups that the next call sends: digests and numbers of sequences."""

    call: str
    groups: dict[str, int]


class Settled(BaseModel):
    """Result of that call. The last line of a call counts."""

    call: str
    outcome: Outcome


class Noted(BaseModel):
    """An event that the report counts."""

    what: str


class Delivered(BaseModel):
    """The trainer received the batch after `after`. `content`: its digest."""

    after: int
    id: int
    content: str


class TrainedBatch(BaseModel):
    """One step of the trainer: the digests of the groups that it trained on."""

    id: int
    digests: list[str]


class Saved(BaseModel):
    """A checkpoint: what the trainer trained on since the previous one."""

    batches: list[TrainedBatch]


@dataclass(frozen=True)
class Submission:
    """One submitted group, with the result that its environment recorded."""

    digest: str
    sequences: int
    outcome: Outcome


Entry = Started | Joined | Sent | Settled | Noted | Delivered | Saved
_ENTRY: TypeAdapter[Entry] = TypeAdapter(Entry)
E = TypeVar("E", bound=Entry)

FILLER = "filler"
"""Name in the journal for the groups that fill the last batch."""


class Reader:
    """Reads a journal that may still grow. `entries`: all complete lines so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.bytes_read = 0
        self.entries: list[Entry] = []

    def read_on(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self.bytes_read)
            for line in file:
                if line.endswith(b"\n"):
                    self.entries.append(_ENTRY.validate_json(line))
                    self.bytes_read += len(line)


class Journal(ClosesOnExit):
    """Appends to a file, after removing the incomplete line of a killed process.

    `past`: entries of earlier processes. `life`: number of this process.
    """

    def __init__(self, path: Path) -> None:
        path.touch()
        reader = Reader(path)
        reader.read_on()
        os.truncate(path, reader.bytes_read)
        self.past = reader.entries
        self.life = sum(isinstance(entry, Started) for entry in self.past) + 1
        self._file = path.open("ab", buffering=0)
        self._calls = 0
        self.write(Started(pid=os.getpid()))

    def close(self) -> None:
        self._file.close()

    def write(self, entry: Entry) -> None:
        self._file.write(entry.model_dump_json().encode() + b"\n")

    def sent(self, groups: Mapping[str, int]) -> str:
        """Record the next call; returns its name."""
        self._calls += 1
        call = f"{self.life}.{self._calls}"
        self.write(Sent(call=call, groups=dict(groups)))
        return call

    def settled(self, call: str, outcome: Outcome) -> None:
        self.write(Settled(call=call, outcome=outcome))


def journal_path(directory: Path, name: str) -> Path:
    return directory / f"{name}.jsonl"


class Records:
    """The journals of one soak."""

    def __init__(self, directory: Path) -> None:
        # The trainer first: its groups are then certainly in the other journals.
        names = (TRAINER, *ENVIRONMENTS, FILLER)
        self._readers = {name: Reader(journal_path(directory, name)) for name in names}

    def read_on(self) -> None:
        for reader in self._readers.values():
            reader.read_on()

    def of_kind(self, kind: type[E]) -> Iterator[E]:
        for reader in self._readers.values():
            yield from (entry for entry in reader.entries if isinstance(entry, kind))

    def last(self, name: str, kind: type[E]) -> E | None:
        """The newest entry of one type and writer."""
        reader = self._readers[name]
        reader.read_on()
        return next((entry for entry in reversed(reader.entries) if isinstance(entry, kind)), None)

    def batches_received(self) -> int:
        """Number of batches that the trainer received, with repeated ones."""
        trainer = self._readers[TRAINER]
        trainer.read_on()
        return sum(isinstance(entry, Delivered) for entry in trainer.entries)

    def line(self) -> list[TrainedBatch]:
        """All batches that the checkpoints include, in order."""
        return [batch for saved in self.of_kind(Saved) for batch in saved.batches]

    def submissions(self) -> list[Submission]:
        return [found for reader in self._readers.values() for found in submissions(reader.entries)]


def submissions(entries: list[Entry]) -> Iterator[Submission]:
    """All groups of one writer. A call without a recorded result counts as unanswered."""
    outcomes = {entry.call: entry.outcome for entry in entries if isinstance(entry, Settled)}
    for entry in entries:
        if isinstance(entry, Sent):
            outcome = outcomes.get(entry.call, Outcome.UNANSWERED)
            for digest, sequences in entry.groups.items():
                yield Submission(digest, sequences, outcome)
