"""What the processes of a run note for its verdict: one JSON object a line.

A process continues only after it has written a line, in a file of its own. So SIGKILL loses no
line, and cuts at most the last one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

VARIABLE = "GRPO_TEST_JOURNALS"
"""Names the directory of the journals of environments. That of a trainer is `JOURNAL`."""
JOURNAL = "journal"
"""Directory below the save path, with an entry for each batch that was taken."""
Entry = dict[str, Any]


class Outcome(StrEnum):
    ACKNOWLEDGED = "acknowledged"
    """run-api answered 2xx."""
    REFUSED = "refused"
    """run-api answered 4xx, as expected."""
    UNANSWERED = "unanswered"
    """The environment stopped waiting, or was killed, before the answer."""


@dataclass(frozen=True)
class Submission:
    """One submitted group, with the result that its environment noted."""

    digest: str
    sequences: int
    outcome: Outcome


class Journal:
    """`past`: entries of earlier processes of this name; `life`: number of this process."""

    def __init__(self, directory: Path, name: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.past = Journals(directory).entries(name)
        self.life = len([*directory.glob(f"{name}.*")]) + 1
        path = directory / f"{name}.{self.life:04}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._calls = 0

    def note(self, **entry: object) -> None:
        os.write(self._file, json.dumps(entry).encode() + b"\n")

    def sent(self, groups: Mapping[str, int]) -> str:
        """Note what the next call sends: digests and numbers of sequences. Returns its name."""
        self._calls += 1
        call = f"{self.life}.{self._calls}"
        self.note(call=call, sent=dict(groups))
        return call

    def settled(self, call: str, outcome: Outcome) -> None:
        """The last outcome of a call counts."""
        self.note(call=call, outcome=outcome)


class Journals:
    """The journals of a directory, which may still grow."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, tuple[int, list[Entry]]] = {}

    def entries(self, name: str = "*") -> list[Entry]:
        files = sorted(self._directory.glob(f"{name}.*.jsonl"))
        return [entry for file in files for entry in self._read_on(file)]

    def submissions(self) -> list[Submission]:
        names = {file.name.partition(".")[0] for file in self._directory.glob("*.jsonl")}
        return [found for name in sorted(names) for found in submissions(self.entries(name))]

    def _read_on(self, path: Path) -> list[Entry]:
        at, found = self._read.get(path, (0, []))
        with path.open("rb") as file:
            file.seek(at)
            for line in file:
                if line.endswith(b"\n"):
                    found.append(json.loads(line))
                    at += len(line)
        self._read[path] = (at, found)
        return found


def lines_of(path: Path) -> list[Entry]:
    """Complete lines of a file whose last line may be unfinished."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def submissions(entries: Iterable[Entry]) -> Iterator[Submission]:
    """All groups of one writer. A call without a noted outcome is unanswered."""
    sent = [entry for entry in entries if "sent" in entry]
    outcomes = {entry["call"]: entry["outcome"] for entry in entries if "outcome" in entry}
    for entry in sent:
        outcome = Outcome(outcomes.get(entry["call"], Outcome.UNANSWERED))
        for digest, sequences in entry["sent"].items():
            yield Submission(digest, sequences, outcome)
