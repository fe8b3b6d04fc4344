"""Everything that the processes wrote down, read on while they write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from tests.soak.hits import ENVIRONMENTS, TRAINER
from tests.soak.journal import Delivered, Entry, Outcome, Reader, Saved, Sent, Settled, TrainedBatch
from tests.soak.verdict import Submission

FILLER = "filler"
"""Writes the journal of the groups that fill up the last batch."""

E = TypeVar("E", bound=Entry)


def journal_path(directory: Path, name: str) -> Path:
    return directory / f"{name}.jsonl"


class Records:
    """The journals of one soak."""

    def __init__(self, directory: Path) -> None:
        # The trainer first: whatever it has trained on was submitted when the others are read.
        names = (TRAINER, *ENVIRONMENTS, FILLER)
        self._readers = {name: Reader(journal_path(directory, name)) for name in names}

    def read_on(self) -> None:
        for reader in self._readers.values():
            reader.read_on()

    def of_kind(self, kind: type[E]) -> Iterator[E]:
        for reader in self._readers.values():
            yield from (entry for entry in reader.entries if isinstance(entry, kind))

    def last(self, name: str, kind: type[E]) -> E | None:
        """The newest entry of one kind and writer."""
        reader = self._readers[name]
        reader.read_on()
        return next((entry for entry in reversed(reader.entries) if isinstance(entry, kind)), None)

    def batches_received(self) -> int:
        """By the trainer, those that were delivered again included."""
        trainer = self._readers[TRAINER]
        trainer.read_on()
        return trainer.counts[Delivered]

    def line(self) -> list[TrainedBatch]:
        """Every batch in the line of checkpoints, in order."""
        return [batch for saved in self.of_kind(Saved) for batch in saved.batches]

    def submissions(self) -> list[Submission]:
        return [found for reader in self._readers.values() for found in submissions(reader.entries)]


def submissions(entries: list[Entry]) -> Iterator[Submission]:
    """Of one writer. A call that its process did not see the end of is unanswered."""
    outcomes = {entry.call: entry.outcome for entry in entries if isinstance(entry, Settled)}
    for entry in entries:
        if isinstance(entry, Sent):
            outcome = outcomes.get(entry.call, Outcome.UNANSWERED)
            for digest, sequences in entry.groups.items():
                yield Submission(digest, sequences, outcome)
