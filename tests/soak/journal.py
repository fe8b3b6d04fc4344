"""What a process of the soak writes down while it works: one JSON object per line, append only.

A line is on its way to the disk before the process goes on, so `SIGKILL` of the process takes none
of it; what must survive more than that is forced to the disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from time import monotonic
from typing import Annotated, Literal

from pydantic import BaseModel, Field, TypeAdapter

from grpo_core.closing import ClosesOnExit


class Outcome(StrEnum):
    ACKNOWLEDGED = "acknowledged"
    """run-api answered 2xx."""
    REFUSED = "refused"
    """run-api answered 4xx."""
    WANTED_REFUSAL = "wanted refusal"
    """The same, and that was the point."""
    UNANSWERED = "unanswered"
    """The environment gave up before an answer came."""


class Sent(BaseModel):
    """Groups that are about to be sent in one call."""

    event: Literal["sent"] = "sent"
    call: str
    digests: list[str]
    sizes: list[int]


class Settled(BaseModel):
    """How that call ended. A call without this line ended with its process: unanswered."""

    event: Literal["settled"] = "settled"
    call: str
    outcome: Outcome
    reason: str = ""


class Waited(BaseModel):
    """How long the caller of one call waited for its return, repeats included."""

    event: Literal["waited"] = "waited"
    kind: str
    seconds: float


class Noted(BaseModel):
    """Something that the report counts."""

    event: Literal["noted"] = "noted"
    what: str


class Joined(BaseModel):
    """The environment is a member of the run under this id; -1 where it left."""

    event: Literal["joined"] = "joined"
    env_id: int


class Started(BaseModel):
    """A process began to write here."""

    event: Literal["started"] = "started"
    life: int


class Delivered(BaseModel):
    """The trainer received a batch, having asked for what comes after another."""

    event: Literal["delivered"] = "delivered"
    life: int
    after: int
    id: int
    content: str


Entry = Annotated[
    Sent | Settled | Waited | Noted | Joined | Started | Delivered, Field(discriminator="event")
]
_ENTRY: TypeAdapter[Entry] = TypeAdapter(Entry)


class Journal(ClosesOnExit):
    """Appends to a file; what a killed process left of its last line is cut off first."""

    def __init__(self, path: Path) -> None:
        path.touch()
        with path.open("rb+") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)
        self._file = path.open("ab", buffering=0)
        self._calls = 0
        self.life = sum(isinstance(entry, Started) for entry in read_journal(path)) + 1
        self.write(Started(life=self.life))
        _pid_file(path).write_text(str(os.getpid()))

    def close(self) -> None:
        self._file.close()

    def write(self, entry: Entry, durably: bool = False) -> None:
        self._file.write(entry.model_dump_json().encode() + b"\n")
        if durably:
            os.fsync(self._file.fileno())

    def sent(self, digests: Sequence[str], sizes: Sequence[int]) -> str:
        """Returns the name of the call that is about to be made."""
        self._calls += 1
        call = f"{self.life}.{self._calls}"
        self.write(Sent(call=call, digests=list(digests), sizes=list(sizes)))
        return call

    def settled(self, call: str, outcome: Outcome, reason: str = "") -> None:
        """On the disk before this returns."""
        self.write(Settled(call=call, outcome=outcome, reason=reason), durably=True)

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Note how long the block took, however it ends."""
        began = monotonic()
        try:
            yield
        finally:
            self.write(Waited(kind=kind, seconds=monotonic() - began))


def writer_of(path: Path) -> int | None:
    """Process id of the last that opened the journal. Once it has, SIGTERM ends it in order."""
    try:
        return int(_pid_file(path).read_text() or 0)
    except FileNotFoundError:
        return None


def read_journal(path: Path) -> Iterator[Entry]:
    """Every whole line; a file that is not there has none."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield _ENTRY.validate_json(line)


def _pid_file(path: Path) -> Path:
    return path.with_suffix(".pid")
