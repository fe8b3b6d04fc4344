"""Stop signals: the trainer ends behind the step that it takes, so that nothing is lost."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass
class Stop:
    """Defers the first signal during a step to its end. Any other one ends the process at once.

    `number`: of the deferred signal. `listens`: whether signals come here. Otherwise a checkpoint
    cannot be saved at a stop, because other ranks end at once.
    """

    in_step: bool = False
    number: int | None = None
    listens: bool = False

    def listen(self) -> None:
        self.listens = True
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Raises `SystemExit` at the end of the block if a signal arrived in it."""
        self.in_step = True
        yield
        self.in_step = False
        if self.number is not None:
            raise SystemExit(128 + self.number)

    def _handle(self, number: int, _frame: object) -> None:
        is_first, self.number = self.number is None, number
        if not (self.in_step and is_first):
            raise SystemExit(128 + number)
