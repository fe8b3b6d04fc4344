"""What the processes wrote down, gathered for the verdict and for the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from tests.soak.environment import FORGOTTEN
from tests.soak.faults import ENVIRONMENTS, TRAINER
from tests.soak.journal import (
    Delivered,
    Entry,
    Noted,
    Outcome,
    Sent,
    Settled,
    Waited,
    read_journal,
)
from tests.soak.producer import ANSWERED_DIFFERENTLY, OTHER_BODY_TAKEN
from tests.soak.trained_line import TrainedBatch, read_line
from tests.soak.verdict import Evidence, LeftOver, Submission

FILLER = "filler"
"""Name of the journal of those groups that only fill up the last batch."""
LINE = "line"

E = TypeVar("E", bound=Entry)


def journal_path(directory: Path, name: str) -> Path:
    return directory / f"{name}.jsonl"


@dataclass(frozen=True)
class Records:
    """Everything written so far; `entries` by the name of the writer."""

    line: Sequence[TrainedBatch]
    entries: Mapping[str, Sequence[Entry]]

    def of_kind(self, kind: type[E]) -> Iterator[E]:
        for entries in self.entries.values():
            yield from (entry for entry in entries if isinstance(entry, kind))

    def longest_waits_s(self) -> dict[str, float]:
        """By kind of call."""
        longest: dict[str, float] = {}
        for entry in self.of_kind(Waited):
            longest[entry.kind] = max(longest.get(entry.kind, 0.0), entry.seconds)
        return dict(sorted(longest.items()))

    def notes(self) -> Counter[str]:
        """How often each was noted."""
        return Counter(entry.what for entry in self.of_kind(Noted))

    def submissions(self) -> list[Submission]:
        return [found for entries in self.entries.values() for found in _submissions(entries)]

    def fillers(self) -> int:
        return len(list(_submissions(self.entries[FILLER])))

    def evidence(
        self,
        batch_size: int,
        *,
        left_over: LeftOver | None = None,
        left_behind: Mapping[str, float] = MappingProxyType({}),
        incidents: Sequence[str] = (),
    ) -> Evidence:
        return Evidence(
            batch_size=batch_size,
            left_over=left_over,
            line=self.line,
            submissions=self.submissions(),
            deliveries=list(self.of_kind(Delivered)),
            left_behind=left_behind,
            longest_waits_s=self.longest_waits_s(),
            incidents=[*incidents, *self._unwanted_notes()],
        )

    def _unwanted_notes(self) -> list[str]:
        notes = self.notes()
        unwanted = (ANSWERED_DIFFERENTLY, OTHER_BODY_TAKEN, FORGOTTEN)
        return [f"{what}: {notes[what]} times" for what in unwanted if notes[what]]


def read_records(directory: Path) -> Records:
    """The line is read first, so that whatever is in it has its submission."""
    line = read_line(directory / LINE)
    names = (*ENVIRONMENTS, FILLER, TRAINER)
    return Records(
        line, {name: list(read_journal(journal_path(directory, name))) for name in names}
    )


def _submissions(entries: Sequence[Entry]) -> Iterator[Submission]:
    """A call that its process did not live to see the end of is unanswered."""
    outcomes = {entry.call: entry.outcome for entry in entries if isinstance(entry, Settled)}
    for entry in entries:
        if isinstance(entry, Sent):
            outcome = outcomes.get(entry.call, Outcome.UNANSWERED)
            for digest, sequences in zip(entry.digests, entry.sizes, strict=True):
                yield Submission(digest, sequences, outcome)
