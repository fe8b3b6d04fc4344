"""Stop signals: the trainer ends behind the step that it takes, so that nothing is lost."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAVE_GRACE_S = 120
"""All ranks of a host get a stop signal. Rank 0 first finishes a step and saves a checkpoint."""
STARTED_BY = "GRPO_RANK_STARTED_BY"
"""Variable of a rank: process id of the command that started it."""


@dataclass
class Stop:
    """Ends the process at a signal: at once, or at the end of a step.

    `defers`: the first signal during a step waits for the step's end, and a checkpoint is saved.
    `follows`: the process waits up to `SAVE_GRACE_S` until rank 0 ends it. `number`: of the first
    signal.
    """

    defers: bool = False
    follows: bool = False
    in_step: bool = False
    number: int | None = None

    def listen(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Raises `SystemExit` at the end of the block if a signal arrived in it."""
        self.in_step = True
        yield
        self.in_step = False
        if self.number is not None and not self.follows:
            raise SystemExit(128 + self.number)

    def _handle(self, number: int, _frame: object) -> None:
        is_first, self.number = self.number is None, self.number or number
        if is_first and self.follows:
            signal.signal(signal.SIGALRM, self._handle)
            signal.alarm(SAVE_GRACE_S)
        elif not (self.defers and self.in_step and is_first):
            raise SystemExit(128 + self.number)
