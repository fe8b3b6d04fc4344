"""Records of the soak's processes: one JSON object per line, append only.

A line is written before the process goes on, so that `SIGKILL` of the process loses none.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, TypeAdapter

from grpo_core.closing import ClosesOnExit


class Outcome(StrEnum):
    ACKNOWLEDGED = "acknowledged"
    """run-api answered 2xx."""
    REFUSED = "refused"
    """run-api answered 4xx, as it should have."""
    UNANSWERED = "unanswered"
    """The environment gave up, or was killed, before an answer came."""


class Started(BaseModel):
    """A process began to write here. From now on SIGTERM ends it in order."""

    event: Literal["started"] = "started"
    pid: int


class Joined(BaseModel):
    """The environment is a member of the run under this id; None: it has left."""

    event: Literal["joined"] = "joined"
    env_id: int | None


class Sent(BaseModel):
    """Groups about to be sent in one call: digests, and how many sequences each has."""

    event: Literal["sent"] = "sent"
    call: str
    groups: dict[str, int]


class Settled(BaseModel):
    """How that call ended; the last line of a call counts."""

    event: Literal["settled"] = "settled"
    call: str
    outcome: Outcome


class Noted(BaseModel):
    """Something that the report counts."""

    event: Literal["noted"] = "noted"
    what: str


class Delivered(BaseModel):
    """The trainer received a batch after naming the batch `after`; `content` is its digest."""

    event: Literal["delivered"] = "delivered"
    after: int
    id: int
    content: str


class TrainedBatch(BaseModel):
    """One step of the trainer: the digests of the groups that it trained on."""

    id: int
    digests: list[str]


class Saved(BaseModel):
    """A checkpoint: what the trainer trained on since the previous one."""

    event: Literal["saved"] = "saved"
    batches: list[TrainedBatch]


Entry = Started | Joined | Sent | Settled | Noted | Delivered | Saved
_ENTRY: TypeAdapter[Entry] = TypeAdapter(Annotated[Entry, Field(discriminator="event")])


class Reader:
    """Reads a journal that may still grow; `entries` holds every whole line read so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.bytes_read = 0
        self.entries: list[Entry] = []
        self.counts: Counter[type[Entry]] = Counter()

    def read_on(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self.bytes_read)
            for line in file:
                if line.endswith(b"\n"):
                    self._add(_ENTRY.validate_json(line))
                    self.bytes_read += len(line)

    def _add(self, entry: Entry) -> None:
        self.entries.append(entry)
        self.counts[type(entry)] += 1


class Journal(ClosesOnExit):
    """Appends to a file, after cutting off the unfinished line of a killed process.

    `past` holds the entries of earlier processes, `life` counts this process among them.
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
        """Returns the name of the call that is about to be made."""
        self._calls += 1
        call = f"{self.life}.{self._calls}"
        self.write(Sent(call=call, groups=dict(groups)))
        return call

    def settled(self, call: str, outcome: Outcome) -> None:
        self.write(Settled(call=call, outcome=outcome))
