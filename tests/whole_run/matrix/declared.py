"""What a fault of the matrix is, and what became of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from tests.whole_run.commands import SHARED
from tests.whole_run.matrix.whole_run import Outcome, WholeRun

LIMIT_S = 60.0
"""From the end of a fault that passes, or from its start if it stays, to recovery or a named error;
the load of a model not counted. With `--minutes`, `WAITED_S` is the only limit."""
LOAD_S = 60.0
"""Of the code and the model of an inference server."""


class Kind(StrEnum):
    PROCESS = "A process dies or stands still"
    NETWORK = "Network"
    DISK = "Disk"
    MEMORY = "Memory"
    CLOCK = "Clock"
    BYTES = "Bad bytes on the wire"
    VERSION = "The other side is another version"
    CREDENTIALS = "Certificates and tokens"
    GPU = "GPU"


@dataclass(frozen=True)
class Fault:
    """Args:
    name: unique
    injected: by what
    inject: raises AssertionError if a promise is broken; None if `tests` inject it, or nothing does
    tests: ids of pytest that inject it
    happens: the consequence that these tests show, and `error` its name
    mode: of the whole run that it needs; "" if it needs none
    limit_s: on the outcome's `seconds`
    """

    kind: Kind
    name: str
    injected: str
    inject: Callable[[Site], Outcome] | None = None
    tests: tuple[str, ...] = ()
    happens: str = ""
    error: str = ""
    mode: str = ""
    limit_s: float = LIMIT_S


@dataclass
class Site:
    """Where faults are injected: a whole run for those that need one, kept from fault to fault."""

    directory: Path
    _stack: ExitStack = field(default_factory=ExitStack)
    _run: WholeRun | None = None
    _places: int = 0

    def run(self, mode: str) -> WholeRun:
        if self._run is not None and self._run.kind != mode:
            self.end_run()
        if self._run is None:
            self._run = self._stack.enter_context(WholeRun(self.place(), mode))
            self._run.start_all()
        self._run.note_logs()
        self._run.has_full_log = False
        return self._run

    def end_run(self) -> None:
        """The next fault gets a new run."""
        self._run = None
        self._stack.close()

    def place(self) -> Path:
        """A new directory."""
        self._places += 1
        place = self.directory / f"{self._places:03}"
        place.mkdir()
        return place

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_run()


During = Callable[[WholeRun], AbstractContextManager[object]]


def passing(
    kind: Kind, name: str, injected: str, seconds: float, during: During, mode: str = SHARED
) -> Fault:
    """A fault that ends after so long; then the run must go on."""

    def inject(site: Site) -> Outcome:
        run = site.run(mode)
        with during(run):
            time.sleep(seconds)
        return run.goes_on()

    return Fault(kind, name, injected, inject, mode=mode)
